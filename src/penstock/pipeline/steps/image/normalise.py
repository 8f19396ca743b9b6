"""Turn pixels into the numbers that models read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

import cv2
import numpy as np

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.image.pixels import image_type, pixels_of
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType


class Normalise(Step, frozen=True, kw_only=True):
    """Scale pixels and standardise each channel: ``(pixel * scale - mean) / std``, as FP32.

    ``pixel * scale`` is computed in FP64 and rounded, the others in FP32. With the default scale, the result equals that of
    torchvision's ``ToTensor`` and ``Normalize``, and that of the image processors of Hugging Face, to the bit.
    """

    scale: float = 1 / 255
    """Factor of each pixel."""
    mean: tuple[float, ...] = (0.0,)
    """Number that is subtracted, after scaling: one, or one for each channel."""
    std: tuple[float, ...] = (1.0,)
    """Number by which the difference is divided: one, or one for each channel."""

    def __post_init__(self) -> None:
        if (
            not np.isfinite((self.scale, *self.mean, *self.std)).all()
            or not self.mean
            or not np.array(self.std, np.float32).all()
        ):
            raise InvalidConfig("step 'normalise' needs finite numbers, and a 'std' other than 0")
        if not self.std or len({len(self.mean), len(self.std)} - {1}) > 1:
            raise InvalidConfig(f"step 'normalise' has {len(self.mean)} means, but {len(self.std)} values of 'std'")

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture in FP32. Raises InvalidConfig if the numbers of channels differ."""
        given = image_type("normalise", inputs)
        channels = max(len(self.mean), len(self.std))
        if channels > 1 and given.shape[2] not in (-1, channels):
            raise InvalidConfig(f"step 'normalise' has numbers for {channels} channels, but the picture is {given}")
        return {"value": ValueType(Media.IMAGE, DataType.FP32, given.shape, colour=given.colour)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The numbers."""
        pixels = pixels_of(inputs["value"])
        table = self.table(pixels.shape[2])
        if pixels.dtype != np.uint8:
            return {"value": self._computed(pixels)}
        found: Array = cv2.LUT(np.ascontiguousarray(pixels), table.T[None])
        return {"value": found.reshape(pixels.shape)}

    def _computed(self, pixels: Array) -> Array:
        scaled = (pixels.astype(np.float64) * self.scale).astype(np.float32)
        found: Array = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return found

    def table(self, channels: int) -> Array:
        """The result for each of the 256 values of a pixel, of shape [channels, 256]. Raises InvalidInput for too many or too few."""
        wanted = max(len(self.mean), len(self.std))
        if wanted not in (1, channels):
            raise InvalidInput(f"the picture has {channels} channels, but 'normalise' has numbers for {wanted}")
        return _table(self, channels)


@lru_cache(maxsize=64)
def _table(step: Normalise, channels: int) -> Array:
    values = np.repeat(np.arange(256.0)[:, None], channels, axis=1)
    table = np.ascontiguousarray(step._computed(values).T)  # noqa: SLF001 - the same module
    table.flags.writeable = False
    return table


class ImageLayout(Step, frozen=True, kw_only=True):
    """Move the channels of a picture to the front, or to the end."""

    order: Literal["chw", "hwc"] = "chw"
    """Order of the result's axes: ``chw`` (channels first, from height, width, channels), or ``hwc``, the reverse."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture with its axes in the other order. Raises InvalidConfig unless it has three axes."""
        given = inputs["value"]
        if given.many or given.media not in (Media.IMAGE, Media.TENSOR) or len(given.shape) != 3:
            raise wrong_type("layout", "value", "a picture with three axes", given)
        one, two, three = given.shape
        shape = (three, one, two) if self.order == "chw" else (two, three, one)
        media = Media.TENSOR if self.order == "chw" else Media.IMAGE
        return {"value": ValueType(media, given.datatype, shape, colour=given.colour)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The same numbers in the other order, contiguous in memory."""
        axes = (2, 0, 1) if self.order == "chw" else (1, 2, 0)
        return {"value": np.ascontiguousarray(inputs["value"].transpose(axes))}
