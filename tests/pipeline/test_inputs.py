from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.pipeline.inputs import check_inputs, read_array
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType

IMAGE = ValueType(Media.IMAGE, DataType.BYTES)
TYPES = {"image": IMAGE, "question": TEXT, "scores": ValueType(shape=(-1, 2)), "extra": FILE}
GOOD: dict[str, Any] = {"scores": np.zeros((5, 2), np.float32), "image": b"jpeg", "question": "what", "extra": b""}


def test_inputs_come_in_the_declared_order() -> None:
    assert list(check_inputs(TYPES, GOOD)) == list(TYPES)
    assert check_inputs({"image": IMAGE}, {"image": bytearray(b"x")}) == {"image": b"x"}
    assert check_inputs({"image": IMAGE}, {"image": GOOD["scores"]})["image"] is GOOD["scores"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "input 'image' must be the content of a file, or an array of pixels, not NoneType"),
        ({"question": b"bytes"}, "input 'question' must be a text, not bytes"),
        ({"extra": np.zeros(3)}, "input 'extra' must be the content of a file, not ndarray"),
        ({"scores": [1, 2]}, "input 'scores' must be an array, not list"),
        ({"scores": np.zeros((5, 2))}, "data-type is 'FP64', but model expects 'FP32'"),
        ({"scores": np.zeros((5, 3), np.float32)}, "unexpected shape"),
        ({"imagee": b""}, "unexpected input 'imagee'.*did you mean 'image'"),
    ],
)
def test_wrong_inputs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_inputs(TYPES, {**GOOD, **changes})


def test_a_missing_input() -> None:
    with pytest.raises(InvalidArgument, match="input 'extra' is missing"):
        check_inputs(TYPES, {name: value for name, value in GOOD.items() if name != "extra"})


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([1, 2], "FP32"),
        ([[0.5]], "FP64"),
        (3, "INT64"),
        ([1.0, 2.0], "INT64"),
        ([True], "BOOL"),
        ([], "FP32"),
        (7, "BF16"),
    ],
)
def test_numbers_become_arrays(value: Any, datatype: str) -> None:
    found = read_array(value, DataType(datatype))
    assert found.dtype == DataType(datatype).dtype
    np.testing.assert_array_equal(found.astype(np.float64), value)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        ([1.5], "INT64"),
        ([300], "UINT8"),
        ([-1], "UINT8"),
        ([1e39], "FP32"),
        (["a"], "FP32"),
        ([[1], [1, 2]], "FP32"),
        ({}, "FP32"),
        (2, "BOOL"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(value: Any, datatype: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_array(value, DataType(datatype))
