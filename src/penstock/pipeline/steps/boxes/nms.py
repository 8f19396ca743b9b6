"""Non-maximum suppression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

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
        kept = self._kept(boxes, scores, classes)
        return {"boxes": boxes[kept], "scores": scores[kept], "classes": classes[kept]}

    def _kept(self, boxes: Array, scores: Array, classes: Array) -> Array:
        left = descending(scores)
        is_one = self.across_classes or not np.ptp(classes) if classes.size else True
        rows, kept = _Rows.of(boxes[left], None if is_one else classes[left]), list[int]()
        while left.size and len(kept) < self.max_boxes:
            best = _greedy(rows.take(slice(_BLOCK)), self.iou)
            kept += left[best].tolist()
            rest = rows.take(slice(_BLOCK, None))
            stays = ~rows.take(best).suppressed(rest, self.iou).any(axis=0)
            left, rows = left[_BLOCK:][stays], rest.take(stays)
        return np.array(kept[: self.max_boxes], np.int64)


_BLOCK = 32
"""Boxes that are compared at once: fewer calls, for few comparisons that one box at a time would not need."""


class _Rows(msgspec.Struct, frozen=True, eq=False):
    """Boxes by coordinate, in order of their scores."""

    edges: tuple[Array, Array, Array, Array]
    areas: Array
    classes: Array | None
    """None if all boxes are of one class."""

    @classmethod
    def of(cls, boxes: Array, classes: Array | None) -> Self:
        left, top, right, bottom = np.ascontiguousarray(boxes.T)
        return cls((left, top, right, bottom), (right - left) * (bottom - top), classes)

    def take(self, which: Any) -> _Rows:
        left, top, right, bottom = self.edges
        classes = None if self.classes is None else self.classes[which]
        return _Rows((left[which], top[which], right[which], bottom[which]), self.areas[which], classes)

    def suppressed(self, others: _Rows, iou: float) -> Array:
        """A matrix: which box (row) overlaps which of ``others`` (column) too much."""
        left, top, right, bottom = (edge[:, None] for edge in self.edges)
        shared = np.minimum(right, others.edges[2])
        shared -= np.maximum(left, others.edges[0])
        np.maximum(shared, 0, out=shared)
        height = np.minimum(bottom, others.edges[3])
        height -= np.maximum(top, others.edges[1])
        shared *= np.maximum(height, 0, out=height)
        union = np.add(self.areas[:, None], others.areas, out=height)
        union -= shared
        with np.errstate(divide="ignore", invalid="ignore"):  # two boxes without area share none
            shared /= union
        found: Array = shared > iou
        if self.classes is not None and others.classes is not None:
            found &= self.classes[:, None] == others.classes
        return found


def _greedy(rows: _Rows, iou: float) -> list[int]:
    """The positions of the boxes that are kept, among few boxes."""
    packed = np.packbits(rows.suppressed(rows, iou), axis=1, bitorder="little")
    dropped, kept = 0, list[int]()
    for position, bits in enumerate(packed):
        if not dropped >> position & 1:
            kept.append(position)
            dropped |= int.from_bytes(bits.tobytes(), "little")
    return kept
