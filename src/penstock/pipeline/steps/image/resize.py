"""Resize pictures as Pillow, OpenCV or PyTorch do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import cv2
import numpy as np
from PIL import Image

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.interpolate import interpolated
from penstock.pipeline.steps.image.pixels import Side, image_type, pixels_of, sized
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array

Filter = Literal["nearest", "bilinear", "bicubic", "lanczos", "area"]

_PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}
_OPENCV = {
    "nearest": cv2.INTER_NEAREST,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
    "area": cv2.INTER_AREA,
}
_MAX_PIXELS = 1 << 28
"""Limit of the result, for pictures with an extreme ratio of the sides."""


class Resize(Step, frozen=True, kw_only=True):
    """Resize a picture. Give exactly one of ``size``, ``shortest`` and ``longest``.

    - ``like: pillow`` (default) is ``Image.resize``, and so torchvision's ``Resize`` of PIL images, to the bit.
    - ``like: opencv`` is ``cv2.resize``, to the bit. It does not antialias, except with ``filter: area``.
    - ``like: torch`` is ``torch.nn.functional.interpolate``, and so torchvision's ``Resize`` of tensors. FP32 differs by at most 2e-5
      of the largest value, plus 2e-7 of it for each pixel of the longest side, because PyTorch computes positions in FP32. UINT8 is
      computed in FP32 and rounded, as by torchvision's ``Resize``, and differs by at most 1, where rounding decides. ``interpolate``
      of UINT8, and so torchvision's transforms v2, compute in whole numbers if the processor has AVX2, and also round between the
      two axes: in photos, a tenth of the pixels differ by 1 and, with ``bicubic``, a few by up to 4, and by up to 45 at hard edges.
    """

    size: tuple[Side, Side] | None = None
    """Height and width of the result, regardless of the aspect ratio."""
    shortest: Side | None = None
    """Length of the shorter side. The longer side is ``int(shortest * long / short)``, as in torchvision."""
    longest: Side | None = None
    """Length of the longer side. The shorter side is ``int(longest * short / long)``, at least 1."""
    filter: Filter = "bilinear"
    """``nearest``, ``bilinear``, ``bicubic``, ``lanczos`` or ``area`` (Pillow's ``BOX``, PyTorch's ``area``)."""
    like: Literal["pillow", "opencv", "torch"] = "pillow"
    """Library whose result is reproduced."""
    antialias: bool = True
    """With ``like: torch``, the option ``antialias`` of ``bilinear`` and ``bicubic``. It has no effect on other filters."""

    def __post_init__(self) -> None:
        if sum(option is not None for option in (self.size, self.shortest, self.longest)) != 1:
            raise InvalidConfig("step 'resize' needs exactly one of 'size', 'shortest' and 'longest'")
        if self.like == "torch" and self.filter == "lanczos":
            raise InvalidConfig("PyTorch has no filter 'lanczos'", "choose another filter, or 'like: pillow'")

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture in its new size. Raises InvalidConfig unless the input is a picture."""
        given = image_type("resize", inputs)
        height, width, _ = given.shape
        known = self.size is not None or -1 not in (height, width)
        new = self.new_size(height, width) if known else (-1, -1)
        return {"value": sized(given, *new)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The resized picture."""
        pixels = pixels_of(inputs["value"])
        height, width = self.new_size(*pixels.shape[:2])
        if height * width > _MAX_PIXELS:
            raise InvalidInput(
                f"a picture of {list(pixels.shape[:2])} would be resized to {[height, width]}, which is too large"
            )
        return {"value": self.resized(pixels, height, width)}

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result for a picture of ``height`` and ``width``."""
        if self.size is not None:
            return self.size
        short, long = sorted((height, width))
        if self.shortest is not None:
            short, long = self.shortest, int(self.shortest * long / short)
        else:
            assert self.longest is not None
            short, long = max(1, int(self.longest * short / long)), self.longest
        return (short, long) if height <= width else (long, short)

    def resized(self, pixels: Array, height: int, width: int) -> Array:
        """``pixels`` in the size ``height``, ``width``."""
        if pixels.shape[:2] == (height, width):
            return pixels  # as the three libraries do
        if self.like == "pillow":
            return _resized_by_pillow(pixels, height, width, self.filter)
        if self.like == "torch":
            return interpolated(pixels, height, width, self.filter, antialias=self.antialias)
        found: Array = cv2.resize(np.ascontiguousarray(pixels), (width, height), interpolation=_OPENCV[self.filter])
        return found.reshape(height, width, -1)


def _resized_by_pillow(pixels: Array, height: int, width: int, filter: str) -> Array:
    size, resample = (width, height), _PILLOW[filter]
    channels = pixels.shape[2]
    if pixels.dtype == np.uint8 and channels > 1:
        mode = "RGBX" if channels == 4 else None  # Pillow would multiply RGBA by alpha
        return np.asarray(Image.fromarray(pixels, mode).resize(size, resample))
    planes = [np.asarray(Image.fromarray(pixels[..., c]).resize(size, resample)) for c in range(channels)]
    return planes[0][..., None] if channels == 1 else np.dstack(planes)
