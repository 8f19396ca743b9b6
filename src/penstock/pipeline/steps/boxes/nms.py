"""Non-maximum suppression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.boxes.arrays import DETECTIONS, boxes_of, check_array
from penstock.pipeline.steps.boxes.heads import Probability
from penstock.pipeline.steps.scores.labels import comparable
from penstock.pipeline.steps.scores.ranking import descending
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType


class Nms(Step, frozen=True, kw_only=True):
    """Drop each box that overlaps a better one of its class: non-maximum suppression, as torchvision's ``batched_nms``.

    1. Boxes are taken from the highest score to the lowest. Of equal scores, the first box comes first.
    2. A box is dropped if its intersection over union with a box that is kept is greater than ``iou``, computed in FP32.
    3. Boxes of different ``classes`` do not suppress one another. Without ``classes``, all boxes are of class 0.
    """

    inputs: ClassVar[tuple[str, ...]] = ("boxes", "scores", "classes")
    optional: ClassVar[frozenset[str]] = frozenset({"classes"})
    outputs: ClassVar[tuple[str, ...]] = ("boxes", "scores", "classes")

    iou: Probability = 0.45
    """Highest intersection over union of two boxes that are both kept."""
    max_boxes: Annotated[int, msgspec.Meta(ge=1)] = 300
    """Maximum number of boxes in the result."""
    across_classes: bool = False
    """Let boxes of different classes suppress one another."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of detections. Raises InvalidConfig if an input has another shape."""
        check_array("nms", "boxes", inputs, (-1, 4))
        check_array("nms", "scores", inputs, (-1,))
        classes = inputs.get("classes")
        if classes is not None and (classes.many or classes.datatype is not DataType.INT64 or len(classes.shape) != 1):
            raise wrong_type("nms", "classes", "INT64 [n]", classes)
        return dict(DETECTIONS)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The kept boxes, from the highest score to the lowest, with their scores and classes."""
        boxes, scores = boxes_of(inputs["boxes"]), comparable(inputs["scores"], "scores").astype(np.float32, copy=False)
        classes: Array = inputs.get("classes", np.zeros(len(boxes), np.int64))
        if scores.shape != (len(boxes),) or classes.shape != scores.shape:
            raise InvalidInput(f"there are {len(boxes)} boxes, {scores.size} scores and {classes.size} classes")
        kept = self._kept(boxes, scores, np.zeros_like(classes) if self.across_classes else classes)
        return {"boxes": boxes[kept], "scores": scores[kept], "classes": classes[kept]}

    def _kept(self, boxes: Array, scores: Array, classes: Array) -> Array:
        left = descending(scores)
        boxes, classes, kept = boxes[left], classes[left], list[int]()
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        while left.size and len(kept) < self.max_boxes:
            kept.append(int(left[0]))
            low, high = np.maximum(boxes[0, :2], boxes[1:, :2]), np.minimum(boxes[0, 2:], boxes[1:, 2:])
            sides = np.maximum(high - low, 0)
            shared = sides[:, 0] * sides[:, 1]
            with np.errstate(divide="ignore", invalid="ignore"):  # two boxes without area share none
                stays = ~(shared / (areas[0] + areas[1:] - shared) > self.iou)
            stays |= classes[1:] != classes[0]
            left, boxes, areas, classes = left[1:][stays], boxes[1:][stays], areas[1:][stays], classes[1:][stays]
        return np.array(kept, np.int64)
