from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import InvalidData
from penstock.samples.iterable import gather
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 4)),)
ROWS = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), Y)
PAIRS = Signature((TensorSpec("x", DataType.FP32, (2, -1)),), Y)
VOICE = Signature(
    (
        TensorSpec("sound", DataType.FP32, (-1, -1)),
        TensorSpec("state", DataType.FP32, (2, -1, 4)),
        TensorSpec("rate", DataType.INT64, ()),
    ),
    Y,
)


def rows(*shapes: tuple[int, ...], labels: list[Any] | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"x": np.full(shape, number, np.float32)} for number, shape in enumerate(shapes)]
    return [{**one, "labels": label} for one, label in zip(found, labels or [], strict=True)] if labels else found


def gathered(samples: list[dict[str, Any]], signature: Signature = ROWS, independent: bool = False) -> Dataset:
    return gather(samples, signature, "the data", independent=independent)


def shapes(data: Dataset) -> list[tuple[int, ...]]:
    return [data.sample(number)[data.names[0]].shape for number in range(data.count)]


def test_independent_rows_of_a_call_are_samples() -> None:
    data = gathered(rows((2, 3), (3,), (1, 5), labels=[[0, 1], 2, [3]]), independent=True)
    assert shapes(data) == [(1, 3), (1, 3), (1, 3), (1, 5)]
    assert data.joins
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 3]


def test_a_call_of_rows_that_may_depend_on_each_other_is_one_sample() -> None:
    data = gathered(rows((2, 3), (1, 3), (5, 3), (2, 3)))
    assert (data.joins, data.sizes) == (False, 3)
    assert shapes(data) == [(2, 3), (1, 3), (5, 3), (2, 3)]
    assert [call.samples.tolist() for call in data.calls(8)] == [[0], [1], [2], [3]]


def test_single_rows_join_whether_or_not_they_are_proven_independent() -> None:
    data = gathered(rows((1, 3), (3,), (1, 2)))
    assert (data.joins, data.sizes) == (True, 2)
    assert shapes(data) == [(1, 3), (1, 3), (1, 2)]


def test_a_fixed_batch_is_cut_into_rows_of_one_size() -> None:
    data = gathered(rows((2, 3), (2, 3)), PAIRS)
    assert data.count == 4
    assert data.rows(0, 2)["x"].shape == (2, 3)
    with pytest.raises(
        InvalidData, match="exactly 2 samples at a time, but samples of the data have 2 different shapes"
    ):
        gathered(rows((2, 3), (2, 4)), PAIRS)


def test_single_rows_join_to_calls_of_a_fixed_batch() -> None:
    data = gathered(rows((3,), (1, 3), (2, 3)), PAIRS)
    assert (data.count, data.joins) == (4, True)
    assert [call.inputs["x"].shape for call in data.calls(2)] == [(2, 3), (2, 3)]


def test_several_rows_that_are_no_call_are_a_mistake() -> None:
    with pytest.raises(InvalidData, match=r"has shape \[2, -1\], but the sample has shape \[3, 5\]"):
        gathered(rows((3, 5)), PAIRS)


def test_calls_of_a_model_without_rows_are_samples() -> None:
    samples = [
        {"sound": [[0.5] * length], "state": np.zeros((2, 1, 4), np.float32), "rate": rate}
        for length, rate in ((8, 16000), (8, 8000), (6, 8000))
    ]
    data = gathered(samples, VOICE)
    assert (data.count, data.joins, data.sizes) == (3, False, 2)
    assert data.sample(1)["rate"] == 8000
    assert data.sample(2)["sound"].shape == (1, 6)


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([[0], [1], [2]], [0, 1, 2]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [5, 6]]),
        ([[1, 2], [3], [4, 5, 6]], [[1, 2, -1], [3, -1, -1], [4, 5, 6]]),
    ],
)
def test_labels_are_stacked_and_class_numbers_padded(labels: list[Any], wanted: list[Any]) -> None:
    found = gathered(rows((3,), (3,), (3,), labels=labels)).labels
    assert found is not None
    assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("samples", "cause"),
    [
        (
            [{"x": [1.0]}, {"x": [1.0], "labels": 1}],
            "sample 1 of the data: some samples have labels, and some have none",
        ),
        (
            [{"x": [1.0], "labels": 1}, {"x": [1.0]}],
            "sample 1 of the data: some samples have labels, and some have none",
        ),
        ([{"x": [1.0], "labels": [[1], [2, 3]]}], "labels have lists of different lengths"),
        ([{"x": [1.0], "labels": [1.5, 2]}, {"x": [1.0], "labels": [1.5]}], "the data: labels have 2 different shapes"),
        ([{"x": [1.0], "labels": None}], "the data: labels must be numbers or text"),
        ([{"x": [1.0], "labels": -1}], "the data: labels must not be negative"),
        ([{"x": "text"}], "sample 0 of the data: input 'x' is FP32, but the data contain str 'text'"),
        (
            [{"x": [[[1.0]]]}],
            r"sample 0 of the data: input 'x' has shape \[-1, -1\], but the sample has shape \[1, 1, 1\]",
        ),
        ([{"x": [1e99]}], "sample 0 of the data: input 'x' contains NaN or infinity"),
        ([], "the data has no samples"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples: list[dict[str, Any]], cause: str) -> None:
    with pytest.raises(InvalidData, match=cause):
        gathered(samples)


def test_inputs_of_a_call_agree_in_rows() -> None:
    signature = Signature((*ROWS.inputs, TensorSpec("m", DataType.INT64, (-1,))), Y)
    with pytest.raises(InvalidData, match=r"differ in number of rows: \{'x': 2, 'm': 3\}"):
        gathered([{"x": np.zeros((2, 3), np.float32), "m": np.arange(3)}], signature)


def test_a_call_of_rows_needs_a_label_for_each() -> None:
    with pytest.raises(InvalidData, match=r"the sample has 2 rows, but labels of shape \[\]"):
        gathered(rows((2, 3), labels=[1]), independent=True)
