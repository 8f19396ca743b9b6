"""Crop and pad pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import cv2
import msgspec
import numpy as np

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.pixels import Side, image_type, pixels_of, sized
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array


class CropImage(Step, frozen=True, kw_only=True):
    """Cut a rectangle out of a picture: from the centre, or from ``at``.

    A centre crop pads a smaller picture with zeros, as the libraries do. A rectangle from ``at`` must lie in the picture.
    """

    size: tuple[Side, Side]
    """Height and width of the result."""
    at: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]] | None = None
    """Top and left edge of the rectangle. Default: the centre."""
    like: Literal["torchvision", "transformers"] = "torchvision"
    """Library whose centre is used. They differ by one pixel if the margin is odd: torchvision rounds half to even."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture in its new size. Raises InvalidConfig unless the input is a picture."""
        return {"value": sized(image_type("crop", inputs), *self.size)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The rectangle. Raises InvalidInput if it does not lie in the picture."""
        pixels = pixels_of(inputs["value"])
        if self.at is None:
            for axis, length in enumerate(self.size):
                pixels = _centred(pixels, axis, length, self.like)
            return {"value": np.ascontiguousarray(pixels)}
        (top, left), (height, width) = self.at, self.size
        found = pixels[top : top + height, left : left + width]
        if found.shape[:2] != self.size:
            raise InvalidInput(
                f"a crop of {[height, width]} at {[top, left]} is not in a picture of {list(pixels.shape[:2])}"
            )
        return {"value": np.ascontiguousarray(found)}


def _centred(pixels: Array, axis: int, length: int, like: str) -> Array:
    """The middle ``length`` pixels along ``axis``, padded with zeros if there are fewer."""
    margin = pixels.shape[axis] - length
    if margin < 0:
        before = -margin // 2 if like == "torchvision" else -(margin // 2)
        edges = [(0, 0)] * pixels.ndim
        edges[axis] = (before, -margin - before)
        return np.pad(pixels, edges)
    start = round(margin / 2) if like == "torchvision" else margin // 2
    return pixels[start : start + length] if axis == 0 else pixels[:, start : start + length]


class PadImage(Step, frozen=True, kw_only=True):
    """Pad a picture to a size. Give exactly one of ``size`` and ``multiple_of``."""

    size: tuple[Side, Side] | None = None
    """Height and width of the result. A larger picture is an error."""
    multiple_of: Side | None = None
    """Pad each side to the next multiple of this number."""
    centred: bool = False
    """Put the picture in the centre. Default: in the top left corner."""
    value: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = 0
    """Value of the new pixels."""

    def __post_init__(self) -> None:
        if (self.size is None) == (self.multiple_of is None):
            raise InvalidConfig("step 'pad_image' needs exactly one of 'size' and 'multiple_of'")

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture in its new size. Raises InvalidConfig if the input is no picture, or larger than ``size``."""
        given = image_type("pad_image", inputs)
        height, width, _ = given.shape
        if self.size is not None and (height > self.size[0] or width > self.size[1]):
            raise InvalidConfig(f"step 'pad_image' has 'size: {list(self.size)}', but the picture is {given}")
        known = self.size is not None or -1 not in (height, width)
        return {"value": sized(given, *(self._new_size(height, width) if known else (-1, -1)))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The padded picture. Raises InvalidInput if it is larger than ``size``."""
        pixels = pixels_of(inputs["value"])
        height, width = pixels.shape[:2]
        new = self._new_size(height, width)
        if height > new[0] or width > new[1]:
            raise InvalidInput(
                f"the picture of {[height, width]} is larger than {list(new)}", "resize it before 'pad_image'"
            )
        down, right = new[0] - height, new[1] - width
        top, left = (down // 2, right // 2) if self.centred else (0, 0)
        return {"value": bordered(pixels, (top, down - top, left, right - left), self.value)}

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        assert self.multiple_of is not None
        return -(-height // self.multiple_of) * self.multiple_of, -(-width // self.multiple_of) * self.multiple_of


class Letterbox(Step, frozen=True, kw_only=True):
    """Resize a picture into a rectangle with its aspect ratio kept, and pad the rest, as YOLO models need it.

    ``scale_boxes`` with ``letterbox: true`` maps boxes back.
    """

    size: tuple[Side, Side]
    """Height and width of the result."""
    value: Annotated[int, msgspec.Meta(ge=0, le=255)] = 114
    """Value of the new pixels."""
    scale_up: bool = True
    """Enlarge smaller pictures."""
    like: Literal["ultralytics", "yolox"] = "ultralytics"
    """Place of the picture: in the centre with rounded sizes (Ultralytics), or top left with truncated sizes (YOLOX)."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture in its new size. Raises InvalidConfig unless the input is a picture."""
        return {"value": sized(image_type("letterbox", inputs), *self.size)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The picture, resized as ``cv2.resize`` does with INTER_LINEAR, and padded."""
        pixels = np.ascontiguousarray(pixels_of(inputs["value"]))
        _, (height, width), edges = placed(pixels.shape[0], pixels.shape[1], self)
        if pixels.shape[:2] != (height, width):
            pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR).reshape(height, width, -1)
        return {"value": bordered(pixels, edges, self.value)}


def placed(height: int, width: int, box: Letterbox) -> tuple[float, tuple[int, int], tuple[int, int, int, int]]:
    """For a picture in a letterbox: the ratio, its new size, and the padding at the top, bottom, left and right."""
    ratio = min(box.size[0] / height, box.size[1] / width)
    if not box.scale_up:
        ratio = min(ratio, 1.0)
    whole = math.floor if box.like == "yolox" else round
    # At least one pixel: a line of 10000 × 1 has no height in a letterbox of 640.
    new = max(1, whole(height * ratio)), max(1, whole(width * ratio))
    down, right = box.size[0] - new[0], box.size[1] - new[1]
    if box.like == "yolox":
        return ratio, new, (0, down, 0, right)
    top, left = round(down / 2 - 0.1), round(right / 2 - 0.1)
    return ratio, new, (top, down - top, left, right - left)


def bordered(pixels: Array, edges: tuple[int, int, int, int], value: float) -> Array:
    """``pixels`` with a border of ``value``, of the given widths at the top, bottom, left and right."""
    top, bottom, left, right = edges
    if not any(edges):
        return pixels
    found: Array = cv2.copyMakeBorder(
        np.ascontiguousarray(pixels), top, bottom, left, right, cv2.BORDER_CONSTANT, value=(value,) * 4
    )
    return found.reshape(*found.shape[:2], -1)
