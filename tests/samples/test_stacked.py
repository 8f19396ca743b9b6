"""Samples that are stacked in one array per input."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.samples.hints import InputHints
from penstock.samples.open import load_dataset
from penstock.samples.stacked import check_dataset
from penstock.tensor import DataType, Signature, TensorSpec

Y = TensorSpec("y", DataType.FP32, (-1, 4))
SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (Y,))
X = np.arange(12, dtype=np.float32).reshape(4, 3)
VOICE = Signature(
    (
        TensorSpec("sound", DataType.FP32, (-1, 16)),
        TensorSpec("state", DataType.FP32, (2, -1, 8)),
        TensorSpec("rate", DataType.INT64, ()),
    ),
    (Y,),
)
"""A model without an axis for samples: a scalar, and a state with the batch on its second axis."""


def taking(datatype: DataType, *shape: int) -> Signature:
    return Signature((TensorSpec("x", datatype, shape),), (Y,))


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def test_inputs_and_labels_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "data.npz", x=X, labels=np.array([0, 1, 2, 3]), extra=np.zeros(99))
    data = load_dataset(path, SIGNATURE)
    np.testing.assert_array_equal(data.inputs["x"], X)
    np.testing.assert_array_equal(data.labels, [0, 1, 2, 3])
    assert list(data.inputs) == ["x"]
    assert data.count == 4
    np.testing.assert_array_equal(data.rows(1, 3)["x"], X[1:3])


def test_labels_are_optional_and_may_be_a_column() -> None:
    assert check_dataset({"x": X}, SIGNATURE).labels is None
    column = check_dataset({"x": X, "labels": np.array([[0], [1], [2], [3]], np.uint8)}, SIGNATURE).labels
    np.testing.assert_array_equal(column, [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["label", "Labels", "LABEL", "_labels"])
def test_labels_with_a_misspelt_name_are_refused(name: str) -> None:
    with pytest.raises(InvalidData, match=f"'{name}' is not an input of the model, and labels must be named 'labels'"):
        check_dataset({"x": X, name: np.arange(4)}, SIGNATURE)
    assert check_dataset({"x": X, name: np.arange(4), "labels": np.arange(4)}, SIGNATURE).labels is not None
    spec = TensorSpec(name, DataType.INT64, (-1,))
    signature = Signature((*SIGNATURE.inputs, spec), SIGNATURE.outputs)
    assert check_dataset({"x": X, name: np.arange(4)}, signature).labels is None


def test_a_model_input_called_labels_is_an_input() -> None:
    signature = Signature((*SIGNATURE.inputs, TensorSpec("labels", DataType.FP32, (-1,))), (Y,))
    data = check_dataset({"x": X, "labels": np.ones(4, np.float32)}, signature)
    assert data.labels is None
    assert list(data.inputs) == ["x", "labels"]


def test_text_is_taken_for_bytes() -> None:
    data = check_dataset({"x": np.array([["a"], ["b"]])}, taking(DataType.BYTES, -1, 1))
    assert data.inputs["x"].dtype == object
    assert data.inputs["x"].tolist() == [["a"], ["b"]]
    assert len(data.digest) == 64


def test_bfloat16_comes_back_from_a_file(tmp_path: Path) -> None:
    rows = X.astype(ml_dtypes.bfloat16)
    data = load_dataset(saved(tmp_path / "data.npz", x=rows), taking(DataType.BF16, -1, 3))
    np.testing.assert_array_equal(data.inputs["x"].astype(np.float32), X)


def test_a_foreign_byte_order_is_turned() -> None:
    data = check_dataset({"x": X.astype(">f4")}, SIGNATURE)
    assert data.inputs["x"].dtype == np.dtype("=f4")
    np.testing.assert_array_equal(data.inputs["x"], X)


@pytest.mark.parametrize(
    ("arrays", "cause"),
    [
        ({}, r"no array for input\(s\) \['x'\]; the data have \[\]"),
        ({"image": X}, r"no array for input\(s\) \['x'\]; the data have \['image'\]"),
        ({"x": X[:, :2]}, r"has shape \[-1, 3\], but the data has shape \[4, 2\]"),
        ({"x": X[0]}, r"has 2 dimension\(s\) \[-1, 3\], but the data has shape \[3\]"),
        ({"x": np.float32(1)}, r"the data has shape \[\]"),
        ({"x": X.astype(np.float64)}, "is FP32, but the data is float64"),
        ({"x": X.astype(np.complex64)}, "is FP32, but the data is complex64"),
        ({"x": X.astype("datetime64[s]")}, "is FP32, but the data is datetime64"),
        ({"x": X.astype(str)}, "is FP32, but the data is <U"),
        ({"x": X[:0]}, "'x' has no samples"),
        ({"x": X, "labels": np.arange(3)}, r"differ in number of samples: \{'x': 4, 'labels': 3\}"),
        ({"x": X, "labels": np.float32([0, 1, np.nan, 3])}, "labels contain NaN"),
        ({"x": X, "labels": np.ones(4, complex)}, r"labels must be numbers or text, one row per sample.*complex"),
        (
            {"x": X, "labels": np.ones((4, 0), int)},
            r"labels must be numbers or text, one row per sample.*shape \[4, 0\]",
        ),
        ({"x": X, "labels": np.array(3)}, r"labels must be numbers or text, one row per sample.*shape \[\]"),
        ({"x": X, "labels": np.array([0, -1, 2, 3])}, "must not be negative, .* the label at index 1 is -1"),
    ],
)
def test_bad_data_is_refused_with_its_cause(tmp_path: Path, arrays: dict[str, np.ndarray], cause: str) -> None:
    with pytest.raises(InvalidData, match=cause) as raised:
        load_dataset(saved(tmp_path / "bad.npz", **arrays), SIGNATURE)
    assert "bad.npz" in raised.value.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16, DataType.FP32, DataType.FP64])
def test_what_is_not_finite_is_found(datatype: DataType, value: float) -> None:
    rows = np.zeros((1000, 3), datatype.dtype)
    rows[700, 1] = rows[900, 2] = value
    with pytest.raises(InvalidData, match="in 2 of 1000 samples, first in sample 700") as raised:
        check_dataset({"x": rows}, taking(datatype, -1, 3))
    assert raised.value.hint


def test_inputs_must_agree_in_number_of_samples() -> None:
    signature = Signature((*SIGNATURE.inputs, TensorSpec("z", DataType.INT64, (-1,))), (Y,))
    with pytest.raises(InvalidData, match=r"\{'x': 4, 'z': 5\}"):
        check_dataset({"x": X, "z": np.arange(5)}, signature)


def test_a_fixed_batch_takes_multiples_of_it() -> None:
    signature = taking(DataType.FP32, 2, 3)
    assert check_dataset({"x": X}, signature).count == 4
    with pytest.raises(InvalidData, match="takes exactly 2 samples at a time, but the data has 3"):
        check_dataset({"x": X[:3]}, signature)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800, 0xDFFF])
def test_text_that_is_not_unicode_is_refused(code: int, order: str) -> None:
    signature = Signature((TensorSpec("t", DataType.BYTES, (-1,)),), ())
    codes = np.array([65, 0x10FFFF, 0xD7FF, 0xE000], f"{order}u4")
    assert check_dataset({"t": codes.view(f"{order}U2")}, signature).count == 2
    codes[1] = code
    with pytest.raises(InvalidData, match="not valid Unicode"):
        check_dataset({"t": codes.view(f"{order}U2")}, signature)


def test_labels_of_any_kind_have_one_row_per_sample() -> None:
    for labels in (np.ones((4, 3, 5), np.float32), np.array(list("abcd")), np.eye(4, dtype=bool)):
        np.testing.assert_array_equal(check_dataset({"x": X, "labels": labels}, SIGNATURE).labels, labels)


def test_a_model_without_an_axis_for_samples_takes_whole_calls() -> None:
    sound, state = np.ones((5, 2, 16), np.float32), np.zeros((5, 2, 2, 8), np.float32)
    data = check_dataset({"sound": sound, "state": state, "rate": np.full(5, 16000)}, VOICE)
    assert (data.count, data.joins, data.stacks) == (5, False, False)
    call = data.sample(3)
    assert {name: array.shape for name, array in call.items()} == {"sound": (2, 16), "state": (2, 2, 8), "rate": ()}
    assert isinstance(call["rate"], np.ndarray)


def test_an_array_of_one_call_is_used_in_every_call() -> None:
    sound = np.arange(5 * 16, dtype=np.float32).reshape(5, 1, 16)
    data = check_dataset({"sound": sound, "state": np.zeros((2, 1, 8), np.float32), "rate": np.array(8000)}, VOICE)
    assert data.count == 5
    for number, (_, inputs) in enumerate(data.calls(64)):
        np.testing.assert_array_equal(inputs["sound"], sound[number])
        assert inputs["state"].shape == (2, 1, 8)
        assert inputs["rate"] == 8000


def test_arrays_of_the_models_rank_are_one_call() -> None:
    call = {"sound": np.ones((1, 16), np.float32), "state": np.zeros((2, 1, 8), np.float32), "rate": np.array(8000)}
    assert check_dataset(call, VOICE).count == 1


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"rate": np.full(4, 1)}, r"differ in number of samples: \{'sound': 5, 'state': 5, 'rate': 4\}"),
        (
            {"state": np.zeros((5, 3, 1, 8), np.float32)},
            r"'state' has shape \[2, -1, 8\], but the data has shape \[5, 3, 1, 8\]",
        ),
        ({"rate": np.full((5, 1), 1)}, r"'rate' has 0 dimension\(s\) \[\], but the data has shape \[5, 1\]"),
        ({"sound": np.full((5, 1, 16), np.nan, np.float32)}, "'sound' contains NaN or infinity in 5 of 5 samples"),
        ({"rate": np.ones(5)}, "'rate' is INT64, but the data is float64"),
    ],
)
def test_calls_that_do_not_fit_are_refused(changed: dict[str, np.ndarray], cause: str) -> None:
    calls = {
        "sound": np.ones((5, 1, 16), np.float32),
        "state": np.zeros((5, 2, 1, 8), np.float32),
        "rate": np.full(5, 16000),
    }
    with pytest.raises(InvalidData, match=cause):
        check_dataset({**calls, **changed}, VOICE)


def test_calls_of_a_model_with_rows_are_rows_only_if_rows_are_independent() -> None:
    calls = {"x": np.arange(24, dtype=np.float32).reshape(4, 2, 3), "labels": np.arange(8)}
    data = check_dataset(calls, SIGNATURE, independent=True)
    assert (data.count, data.joins) == (8, True)
    np.testing.assert_array_equal(data.inputs["x"], calls["x"].reshape(8, 3))
    data = check_dataset({"x": calls["x"]}, SIGNATURE)
    assert (data.count, data.joins) == (4, False)
    np.testing.assert_array_equal(data.sample(1)["x"], calls["x"][1])
    assert check_dataset({"x": calls["x"][:, :1]}, SIGNATURE).joins


def test_nan_is_valid_where_it_stands_for_a_missing_value() -> None:
    rows = np.zeros((600, 3), np.float32)
    rows[1, 0] = np.nan
    hints = InputHints({}, lambda _: {}, missing=frozenset({"x"}))
    assert check_dataset({"x": rows}, taking(DataType.FP32, -1, 3), hints=hints).count == 600
    rows[500, 2] = np.inf
    with pytest.raises(InvalidData, match="infinity in 1 of 600 samples, first in sample 500"):
        check_dataset({"x": rows}, taking(DataType.FP32, -1, 3), hints=hints)
