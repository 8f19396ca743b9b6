"""The form of pictures between steps: arrays of shape [height, width, channels]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import wrong_type
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

Channels = Literal["rgb", "bgr", "grey"]
Library = Literal["pillow", "opencv"]
Side = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
"""Length of a side, in pixels."""

CHANNELS = {"grey": 1, "rgb": 3, "bgr": 3, "rgba": 4}
"""Number of channels by the order of channels."""


def image_type(step: str, inputs: Mapping[str, ValueType], name: str = "value") -> ValueType:
    """The type of the picture ``name``. Raises InvalidConfig if it is not one of shape [height, width, channels]."""
    given = inputs[name]
    wanted = "a picture [height, width, channels] of UINT8 or FP32"
    if given.many or given.media not in (Media.IMAGE, Media.TENSOR) or len(given.shape) != 3:
        raise wrong_type(step, name, wanted, given)
    if given.datatype not in (DataType.UINT8, DataType.FP32) or given.shape[2] not in (-1, 1, 3, 4):
        raise wrong_type(step, name, wanted, given)
    return given


def pixels_of(value: Value, name: str = "value", order: str = "") -> Array:
    """The picture ``value``. Raises InvalidInput if it has no pixels, is not of shape [height, width, channels], or has other
    channels than ``order``, or than any picture."""
    if getattr(value, "ndim", 0) != 3 or not value.size:
        shape = list(getattr(value, "shape", ()))
        raise InvalidInput(f"'{name}' has the shape {shape}, not [height, width, channels] with at least one pixel")
    pixels: Array = value
    if pixels.shape[2] not in CHANNELS.values():
        raise InvalidInput(f"'{name}' has {pixels.shape[2]} channels, but a picture has 1, 3 or 4")
    if order and pixels.shape[2] != CHANNELS[order]:
        raise InvalidInput(f"the picture has {pixels.shape[2]} channels, not {CHANNELS[order]} ({order})")
    return pixels


def sized(given: ValueType, height: int, width: int) -> ValueType:
    """``given``, with another size."""
    shape = (height, width, *given.shape[2:])
    return msgspec.structs.replace(given, shape=shape)
