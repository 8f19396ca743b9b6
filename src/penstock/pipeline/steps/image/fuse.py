"""One step for several steps on pixels, with the same result to the bit.

1. Steps on pixels become one step, so that a pipeline passes one value instead of several.
2. In it, ``normalise`` and ``layout`` (and a swap of RGB and BGR before them) become one pass from a table of 256 values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import cv2
import numpy as np

from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.channels import Colour
from penstock.pipeline.steps.image.geometry import CropImage, Letterbox, PadImage
from penstock.pipeline.steps.image.normalise import ImageLayout, Normalise
from penstock.pipeline.steps.image.pixels import pixels_of
from penstock.pipeline.steps.image.resize import Resize
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array

FUSABLE = (Colour, CropImage, ImageLayout, Letterbox, Normalise, PadImage, Resize)
"""Steps that ``fuse`` takes. Each has one input and one output, both called ``value``."""

_SWAP = {"rgb", "bgr"}


class Fused(Step, frozen=True, kw_only=True):
    """Steps on pixels, one after the other."""

    steps: tuple[Step, ...]
    """The steps, in order."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type that the last step returns."""
        for step in self.steps:
            inputs = step.check(inputs)
        return dict(inputs)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The value that the last step returns."""
        for step in self.steps:
            inputs = step.run(inputs)
        return dict(inputs)


class NormalisePlanes(Fused, frozen=True, kw_only=True):
    """``normalise`` and then ``layout`` in the order ``chw``. A swap of RGB and BGR may come before them."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The numbers, of shape [channels, height, width]."""
        pixels = pixels_of(inputs["value"])
        height, width, channels = pixels.shape
        *swap, normalise, _ = self.steps
        if pixels.dtype != np.uint8 or (swap and channels != 3) or not isinstance(normalise, Normalise):
            return super().run(inputs)
        table, planes = normalise.table(channels), cv2.split(np.ascontiguousarray(pixels))
        found: Array = np.empty((channels, height, width), np.float32)
        for channel, plane in enumerate(reversed(planes) if swap else planes):
            cv2.LUT(plane, table[channel], found[channel])
        return {"value": found}


def fuse(steps: Sequence[Step]) -> Step:
    """``steps``, each of which reads the result of the one before and is in ``FUSABLE``, as one step with the same result."""
    left, fused = list(steps), list[Step]()
    while left:
        match left:
            case [Colour() as swap, Normalise(), ImageLayout(order="chw"), *_] if {swap.source, swap.to} == _SWAP:
                count = 3
            case [Normalise(), ImageLayout(order="chw"), *_]:
                count = 2
            case _:
                count = 1
        fused.append(NormalisePlanes(steps=tuple(left[:count])) if count > 1 else left[0])
        del left[:count]
    return fused[0] if len(fused) == 1 else Fused(steps=tuple(fused))
