"""Find text in the probability map of a detector with differentiable binarisation [M. Liao et al., AAAI 2020]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import cv2
import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.boxes.heads import Probability
from penstock.pipeline.steps.scores.labels import comparable
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array

_MIN_SIDE = 3
"""Shortest side of a region, in pixels, before it is enlarged. After that, it is two pixels more."""


class ContourBoxes(Step, frozen=True, kw_only=True):
    """Find the regions of a probability map [height, width], such as DBNet's, as quadrilaterals, with their mean probability.

    1. The pixels over ``threshold`` are grouped by their contours, of which at most ``max_boxes`` are read.
    2. Each contour gets its rectangle of least area. The score is the mean of the map in it.
    3. The rectangle is enlarged on all sides by ``area * unclip / perimeter``.

    The corners are in pixels of the map: top left, top right, bottom right, bottom left. Boxes are in reading order: by their top, and
    then by their left edge. PaddleOCR rounds the enlarged polygon, so its corners may differ by 2 pixels.
    """

    outputs: ClassVar[tuple[str, ...]] = ("boxes", "scores")

    threshold: Probability = 0.3
    """Pixels with a higher probability belong to a region."""
    box_threshold: Probability = 0.6
    """Boxes with a lower score are dropped."""
    unclip: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.5
    """How much the rectangles are enlarged, because the map shows the text without its border."""
    max_boxes: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """Maximum number of contours that are read."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of quadrilaterals and scores. Raises InvalidConfig unless the input is a map."""
        given = inputs["value"]
        is_map = len(given.shape) == 2 or (len(given.shape) == 3 and given.shape[0] in (-1, 1))
        if given.many or not given.datatype.is_float or not is_map:
            raise wrong_type("contour_boxes", "value", "floating-point numbers [height, width]", given)
        return {"boxes": ValueType(shape=(-1, 4, 2)), "scores": ValueType(shape=(-1,))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The quadrilaterals and their scores."""
        chart = comparable(inputs["value"]).astype(np.float32, copy=False)
        chart = chart[0] if chart.ndim == 3 and len(chart) == 1 else chart
        if chart.ndim != 2 or not chart.size:
            raise InvalidInput(f"'value' has the shape {list(inputs['value'].shape)}, not [height, width]")
        contours, _ = cv2.findContours(
            (chart > self.threshold).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE
        )
        found = [box for contour in contours[: self.max_boxes] if (box := self._box(contour, chart)) is not None]
        found.sort(key=lambda box: (min(y for _, y in box[0]), min(x for x, _ in box[0])))
        boxes = np.array([corners for corners, _ in found], np.float32).reshape(-1, 4, 2)
        return {"boxes": boxes, "scores": np.array([score for _, score in found], np.float32)}

    def _box(self, contour: Array, chart: Array) -> tuple[list[list[float]], float] | None:
        centre, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < _MIN_SIDE:
            return None
        score = _mean_inside(chart, cv2.boxPoints((centre, (width, height), angle)))
        if score < self.box_threshold:
            return None
        distance = width * height * self.unclip / (2 * (width + height))
        size = (width + 2 * distance, height + 2 * distance)
        if min(size) < _MIN_SIDE + 2:
            return None
        points = cv2.boxPoints((centre, size, angle)).clip(0, chart.shape[::-1])
        return _ordered(points), score


def _mean_inside(chart: Array, points: Array) -> float:
    """The mean of ``chart`` in the polygon ``points``."""
    (height, width), (x, y) = chart.shape, points.T.tolist()
    left, right = (min(max(int(edge), 0), width - 1) for edge in (math.floor(min(x)), math.ceil(max(x))))
    top, bottom = (min(max(int(edge), 0), height - 1) for edge in (math.floor(min(y)), math.ceil(max(y))))
    part = chart[top : bottom + 1, left : right + 1]
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(mask, [(points - (left, top)).astype(np.int32)], [1])
    return float(cv2.mean(part, mask)[0])


def _ordered(points: Array) -> list[list[float]]:
    """Four corners of a rectangle, from the top left clockwise: the left two by their height, and the right two."""
    by_column = sorted(points.tolist())
    (top_left, bottom_left), (top_right, bottom_right) = (
        sorted(two, key=lambda point: float(point[1])) for two in (by_column[:2], by_column[2:])
    )
    return [top_left, top_right, bottom_right, bottom_left]
