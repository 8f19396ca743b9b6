"""Types of values, and checks of values against them."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.pipeline.value import FILE, TEXT, Media, ValueType, check_inputs, check_result, read_array
from penstock.tensor import DataType

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
TYPES = st.builds(
    ValueType,
    st.sampled_from(Media),
    st.sampled_from([DataType.FP32, DataType.UINT8, DataType.BYTES]),
    st.lists(st.sampled_from([-1, 1, 3]), max_size=2).map(tuple),
    st.booleans(),
)

ENCODED_IMAGE = ValueType(Media.IMAGE, DataType.BYTES)
INPUTS = {"image": ENCODED_IMAGE, "question": TEXT, "scores": ValueType(shape=(-1, 2)), "extra": FILE}
GOOD: dict[str, Any] = {"scores": np.zeros((5, 2), np.float32), "image": b"jpeg", "question": "what", "extra": b""}


@given(TYPES, TYPES)
def test_fitting_is_symmetric_and_every_type_fits_itself(one: ValueType, two: ValueType) -> None:
    assert one.fits(one)
    assert one.fits(two) == two.fits(one)


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        (IMAGE, ValueType(Media.TENSOR, DataType.UINT8, (224, 224, 3)), True),  # pixels are numbers
        (IMAGE, ValueType(Media.TENSOR, DataType.UINT8, (224, 224, 1)), False),
        (IMAGE, ValueType(Media.TENSOR, DataType.FP32, (224, 224, 3)), False),
        (IMAGE, msgspec.structs.replace(IMAGE, many=True), False),
        (ValueType(shape=(3,)), ValueType(shape=(3, 1)), False),
        (TEXT, FILE, False),
        (TEXT, ValueType(Media.TENSOR, DataType.BYTES), False),
    ],
)
def test_fitting(found: ValueType, wanted: ValueType, fits: bool) -> None:
    assert found.fits(wanted) is fits


def test_texts_for_messages() -> None:
    assert str(TEXT) == "text"
    assert str(IMAGE) == "image UINT8 [-1, -1, 3]"
    assert str(msgspec.structs.replace(FILE, many=True)) == "list of file"
    assert str(ValueType(datatype=DataType.BYTES, shape=(2,))) == "tensor BYTES [2]"


def test_inputs_come_in_the_declared_order() -> None:
    assert list(check_inputs(INPUTS, GOOD)) == list(INPUTS)
    assert check_inputs({"image": ENCODED_IMAGE}, {"image": bytearray(b"x")}) == {"image": b"x"}
    assert check_inputs({"image": ENCODED_IMAGE}, {"image": GOOD["scores"]})["image"] is GOOD["scores"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "input 'image' must be the content of a file, or an array of pixels, not NoneType"),
        ({"image": io.BytesIO()}, "not BytesIO .*pass its content"),
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
        check_inputs(INPUTS, {**GOOD, **changes})


def test_a_missing_input() -> None:
    with pytest.raises(InvalidArgument, match="input 'extra' is missing"):
        check_inputs(INPUTS, {name: value for name, value in GOOD.items() if name != "extra"})


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


def test_arrays_are_contiguous_so_that_sums_have_the_same_bits() -> None:
    view, kind = np.arange(60, dtype=np.float32)[::2], ValueType(shape=(-1,))
    for found in (check_inputs({"x": kind}, {"x": view})["x"], check_result(kind, view)):
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, view)
    picture = np.asfortranarray(np.zeros((3, 4, 3), np.uint8))
    assert check_inputs({"x": ValueType(Media.IMAGE, DataType.BYTES)}, {"x": picture})["x"].flags.c_contiguous
    assert check_result(ValueType(), 2.5).shape == ()
