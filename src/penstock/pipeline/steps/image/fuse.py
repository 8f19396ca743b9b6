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


class NormalisePlanes(Step, frozen=True, kw_only=True):
    """``normalise`` and then ``layout`` in the order ``chw``."""

    normalise: Normalise
    """The first of the steps."""
    swap: Colour | None = None
    """A swap of RGB and BGR before them."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type that the steps return."""
        for step in self._steps():
            inputs = step.check(inputs)
        return dict(inputs)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The numbers, of shape [channels, height, width]."""
        pixels = pixels_of(inputs["value"])
        height, width, channels = pixels.shape
        if pixels.dtype != np.uint8 or (self.swap is not None and channels != 3):
            for step in self._steps():
                inputs = step.run(inputs)
            return dict(inputs)
        self.normalise.check_channels(channels)
        planes = cv2.split(np.ascontiguousarray(pixels))
        table = self.normalise.table(channels)
        found: Array = np.empty((channels, height, width), np.float32)
        for channel, plane in enumerate(planes if self.swap is None else reversed(planes)):
            cv2.LUT(plane, table[channel], found[channel])
        return {"value": found}

    def _steps(self) -> tuple[Step, ...]:
        before = () if self.swap is None else (self.swap,)
        return (*before, self.normalise, ImageLayout())


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


def fuse(steps: Sequence[Step]) -> Step:
    """``steps``, each of which reads the result of the one before and is in ``FUSABLE``, as one step with the same result."""
    left, fused = list(steps), list[Step]()
    while left:
        step, *after = left
        swap = step if isinstance(step, Colour) and {step.source, step.to} == {"rgb", "bgr"} else None
        match after if swap else left:
            case [Normalise() as normalise, ImageLayout(order="chw"), *rest]:
                fused.append(NormalisePlanes(normalise=normalise, swap=swap))
                left = rest
            case _:
                fused.append(step)
                left = after
    return fused[0] if len(fused) == 1 else Fused(steps=tuple(fused))
