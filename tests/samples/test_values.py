"""Python values as arrays of a model's types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.samples.values import check_labels, from_python, typed
from penstock.tensor import DataType, TensorSpec


def spec(datatype: DataType) -> TensorSpec:
    return TensorSpec("x", datatype, (-1,))


@pytest.mark.parametrize(
    ("datatype", "value", "wanted"),
    [
        (DataType.FP32, [1, 2.5], np.float32([1, 2.5])),
        (DataType.FP16, 3, np.float16(3)),
        (DataType.INT64, [[1], [2]], np.array([[1], [2]])),
        (DataType.UINT8, 255, np.uint8(255)),
        (DataType.BOOL, [True, False], np.array([True, False])),
        (DataType.BYTES, ["a", "grün"], np.array(["a", "grün"], object)),
        (DataType.BYTES, "one", np.array("one", object)),
        (DataType.FP32, [], np.zeros(0, np.float32)),
    ],
)
def test_values_get_the_type_of_the_input(datatype: DataType, value: object, wanted: Any) -> None:
    found = from_python(spec(datatype), value)
    assert found.dtype == datatype.dtype
    assert found.shape == np.shape(wanted)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("datatype", "value", "cause"),
    [
        (DataType.FP32, "1", "contain str '1'"),
        (DataType.FP32, [1, None], "contain int 1|contain NoneType None"),
        (DataType.FP32, None, "contain NoneType None"),
        (DataType.FP32, [True], "contain bool True"),
        (DataType.FP32, {"a": 1}, "contain dict"),
        (DataType.FP32, [[1], [2, 3]], "lists of different lengths"),
        (DataType.INT64, [1.5], "contain float 1.5"),
        (DataType.INT64, 2**70, "contain int 1180591620717411303424"),
        (DataType.UINT8, [3, 256], "go from 3 to 256"),
        (DataType.INT8, -129, "go from -129 to -129"),
        (DataType.BOOL, [0, 1], "contain int 0"),
        (DataType.BYTES, ["a", 1], "contain int 1"),
        (DataType.BYTES, ["a", ["b"]], "a list in a list of another length"),
    ],
)
def test_values_of_other_types_are_refused(datatype: DataType, value: object, cause: str) -> None:
    with pytest.raises(InvalidData, match=f"input 'x' .*({cause})") as raised:
        from_python(spec(datatype), value)
    assert raised.value.hint


def test_arrays_keep_their_type_and_are_checked_for_it() -> None:
    array = np.zeros(3)
    assert from_python(spec(DataType.FP32), array) is array
    with pytest.raises(InvalidData, match="'x' is FP32, but the data is float64"):
        typed(spec(DataType.FP32), array)


def test_a_number_too_large_for_its_type_is_infinite_without_a_warning() -> None:
    assert np.isinf(from_python(spec(DataType.FP16), 1e6))


def test_labels_are_numbers_or_text() -> None:
    assert check_labels(np.array([[1], [2]])).tolist() == [1, 2]
    with pytest.raises(InvalidData, match="numbers or text"):
        check_labels(np.ones(2, complex))
