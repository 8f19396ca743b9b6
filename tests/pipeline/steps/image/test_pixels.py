"""The form of pictures."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.image.pixels import image_type, pixels_of, sized
from penstock.pipeline.value import FILE, Media, ValueType
from penstock.tensor import DataType

RGB = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")


@pytest.mark.parametrize("given", [RGB, ValueType(shape=(-1, -1, -1)), ValueType(shape=(8, 8, 4))])
def test_pictures(given: ValueType) -> None:
    assert image_type("resize", {"value": given}) is given


@pytest.mark.parametrize(
    "given",
    [
        FILE,
        msgspec.structs.replace(RGB, many=True),
        ValueType(shape=(8, 8)),
        ValueType(shape=(8, 8, 2)),
        ValueType(Media.AUDIO, shape=(8, 8, 3)),
        ValueType(datatype=DataType.INT64, shape=(8, 8, 3)),
    ],
)
def test_other_values_are_no_pictures(given: ValueType) -> None:
    with pytest.raises(InvalidConfig, match="step 'resize' needs a picture"):
        image_type("resize", {"value": given})


@pytest.mark.parametrize("value", [np.zeros((8, 8)), np.zeros((0, 8, 3)), b"file", "text"])
def test_values_without_pixels_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"'image' has the shape .* with at least one pixel"):
        pixels_of(value, "image")


def test_another_size_keeps_channels_and_colour() -> None:
    assert sized(RGB, 4, 5) == msgspec.structs.replace(RGB, shape=(4, 5, 3))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_other_numbers_of_channels_are_refused(count: int) -> None:
    """The libraries would fail, or read channels as pixels."""
    with pytest.raises(InvalidInput, match=f"'image' has {count} channels, but a picture has 1, 3 or 4"):
        pixels_of(np.zeros((8, 8, count), np.float32), "image")
