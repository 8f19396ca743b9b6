from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidData
from penstock.offline.judge.overlap import check_distinct, copies, overlap_notes, seen_rows

X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)


def data(rows: object, words: bool = False) -> Dataset:
    inputs = {"x": X[rows]}  # type: ignore[index]
    return make_dataset(
        {**inputs, "w": np.array([f"{row}" for row in np.arange(30)[rows]], object)} if words else inputs, None
    )  # type: ignore[index]


def test_rows_of_the_other_set_are_found_wherever_they_are() -> None:
    for words in (False, True):
        fitted, judged = data(np.arange(20), words), data([25, 3, 28, 19, 20], words)
        assert seen_rows(judged, fitted).tolist() == [1, 3]


def test_all_inputs_must_be_equal() -> None:
    fitted = make_dataset({"a": X, "b": X}, None)
    judged = make_dataset({"a": X, "b": X[::-1]}, None)
    assert len(seen_rows(judged, fitted)) == 0


def test_seen_rows_are_named_and_counted() -> None:
    count, (note,) = overlap_notes(data(np.arange(5, 30)), data(np.arange(20)))
    assert count == 15
    assert (
        "15 of 25 evaluation rows are also calibration or training rows (rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …)" in note
    )
    assert overlap_notes(data(np.arange(10)), data(np.arange(10, 20))) == (0, ())
    assert overlap_notes(data(np.arange(10)), None) == (0, ())


def test_copies_are_counted() -> None:
    judged = data([0, 1, 1, 2, 0, 0])
    assert copies(judged) == 3
    assert "3 of 6 evaluation rows are copies" in overlap_notes(judged, None)[1][0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_rows_that_differ_only_in_the_sign_of_zero_are_copies(dtype: type) -> None:
    zero = np.array([[0.0, 1.0], [0.0, -1.0]], dtype)
    negative = np.array([[-0.0, 1.0], [-0.0, -1.0]], dtype)
    judged = make_dataset({"x": np.concatenate([zero, negative])}, None)
    assert copies(judged) == 2
    assert seen_rows(judged, make_dataset({"x": negative[1:]}, None)).tolist() == [1, 3]


def test_labels_that_no_metric_uses_do_not_make_copies_distinct() -> None:
    labelled = make_dataset({"x": np.ones((4, 2), np.float32)}, np.arange(4))
    check_distinct(labelled)
    with pytest.raises(InvalidData, match="3 of 4 evaluation rows are copies"):
        check_distinct(labelled, labelled=False)


def test_up_to_ten_rows_are_all_named() -> None:
    (note,) = overlap_notes(data(np.arange(10)), data(np.arange(20)))[1]
    assert "(rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)" in note
    (note,) = overlap_notes(data(np.arange(11)), data(np.arange(20)))[1]
    assert "8, 9, …)" in note


def test_equal_bytes_of_other_values_are_no_copies() -> None:
    for rows in (np.array(["a", "b"], object), np.array([b"a", b"b", b"a "], object), np.array(["a", "ab"])):
        assert copies(make_dataset({"x": rows}, None)) == 0
        assert copies(make_dataset({"x": np.concatenate([rows, rows])}, None)) == len(rows)


def test_equal_text_is_the_same_row_whatever_holds_it() -> None:
    words = [["a", "b" * 40], ["c" * 40, "d"]]
    fixed, wider = np.array(words), np.array([*words, ["e" * 50, ""]])
    objects = np.array([["".join(list(word)) for word in row] for row in words], object)
    assert fixed.dtype != wider.dtype
    for one in (fixed, wider, objects):
        for other in (fixed, wider, objects):
            assert seen_rows(make_dataset({"x": one[:2]}, None), make_dataset({"x": other}, None)).tolist() == [0, 1]
