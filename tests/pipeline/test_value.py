"""Types of values."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
TYPES = st.builds(
    ValueType,
    st.sampled_from(Media),
    st.sampled_from([DataType.FP32, DataType.UINT8, DataType.BYTES]),
    st.lists(st.sampled_from([-1, 1, 3]), max_size=2).map(tuple),
    st.booleans(),
)


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
