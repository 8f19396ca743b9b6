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
from penstock.pipeline.steps.kernels import non_max
from penstock.pipeline.steps.scores.labels import comparable
from penstock.pipeline.steps.scores.ranking import descending
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType

_MAX_SCORES = 1 << 20
"""Elements of a matrix of scores: more classes are taken in several parts."""


class Nms(Step, frozen=True, kw_only=True):
    """Drop each box that overlaps a better one of its class: non-maximum suppression, as torchvision's ``batched_nms``.

    1. Boxes are taken from the highest score to the lowest. Of equal scores, the first box comes first.
    2. A box is dropped if its intersection over union with a box that is kept is greater than ``iou``, computed in FP32. ``iou``
       itself is not rounded.
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
        classes: Array | None = inputs.get("classes")
        if scores.shape != (len(boxes),) or (classes is not None and classes.shape != scores.shape):
            count = len(boxes) if classes is None else classes.size
            raise InvalidInput(f"there are {len(boxes)} boxes, {scores.size} scores and {count} classes")
        kept = self._kept(boxes, scores, None if self.across_classes else classes)
        names = np.zeros(len(kept), np.int64) if classes is None else classes.take(kept)
        return {"boxes": boxes.take(kept, 0), "scores": scores.take(kept), "classes": names}

    def _kept(self, boxes: Array, scores: Array, classes: Array | None) -> Array:
        order = descending(scores)
        if len(order) < 2:
            return order
        ranks, boxes = np.arange(len(order), 0, -1, dtype=np.float32), boxes.take(order, 0)
        # A box with a negative side overlaps none. ONNX would swap its corners.
        ends = boxes[:, 2:]
        np.maximum(ends, boxes[:, :2], out=ends)
        if classes is None or (classes == classes[:1]).all():
            return order.take(non_max(boxes, ranks[None], self.iou, self.max_boxes))
        names, members = np.unique(classes.take(order), return_inverse=True)
        step, kept = max(1, _MAX_SCORES // len(ranks)), list[Array]()
        for start in range(0, len(names), step):
            of_class = members == np.arange(start, min(start + step, len(names)))[:, None]
            kept.append(non_max(boxes, of_class * ranks, self.iou, self.max_boxes))
        best: Array = np.sort(np.concatenate(kept))[: self.max_boxes]
        return order.take(best)
