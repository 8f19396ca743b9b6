"""Map boxes from the model's input back to the picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np

from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.boxes.arrays import boxes_of, check_array
from penstock.pipeline.steps.image.geometry import Letterbox, placed
from penstock.pipeline.steps.image.pixels import Side, image_type, pixels_of
from penstock.pipeline.value import Value, ValueType


class ScaleBoxes(Step, frozen=True, kw_only=True):
    """Map boxes from the model's input to pixels of ``image``, the picture before it was resized, and clip them to it.

    Boxes are [n, 4], or quadrilaterals [n, 4, 2].
    """

    inputs: ClassVar[tuple[str, ...]] = ("boxes", "image")
    outputs: ClassVar[tuple[str, ...]] = ("boxes",)

    size: tuple[Side, Side]
    """Height and width of the model's input. [1, 1] if the boxes are relative, from 0 to 1."""
    letterbox: Literal["", "ultralytics", "yolox"] = ""
    """Option ``like`` of the step ``letterbox`` that made the model's input. Empty if it was made by ``resize``."""
    scale_up: bool = True
    """Option ``scale_up`` of the step ``letterbox``."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """FP32 of the boxes' shape. Raises InvalidConfig if an input has another type."""
        image_type("scale_boxes", inputs, "image")
        return {"boxes": ValueType(shape=check_array("scale_boxes", "boxes", inputs, (-1, 4), (-1, 4, 2)).shape)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The boxes in the picture."""
        boxes, image = boxes_of(inputs["boxes"], quads=True), pixels_of(inputs["image"], "image")
        height, width = image.shape[:2]
        points = boxes.reshape(-1, 2).astype(np.float64)
        if self.letterbox:
            box = Letterbox(size=self.size, scale_up=self.scale_up, like=self.letterbox)
            ratio, _, (top, _, left, _) = placed(height, width, box)
            points = (points - (left, top)) / ratio
        else:
            points *= (width / self.size[1], height / self.size[0])
        return {"boxes": points.clip(0, (width, height)).astype(np.float32).reshape(boxes.shape)}
