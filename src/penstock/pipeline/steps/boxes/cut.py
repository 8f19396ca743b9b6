"""Cut boxes out of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import cv2
import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.boxes.arrays import boxes_of, check_array
from penstock.pipeline.steps.image.pixels import image_type, pixels_of
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array

_MAX_SIDE = 32_766
"""Longest side that OpenCV warps."""
_NEXT_CORNER = np.array([1, 2, 3, 0])


def _crops_type(given: ValueType) -> ValueType:
    shape = (-1, -1, given.shape[2])
    return msgspec.structs.replace(given, media=Media.IMAGE, shape=shape, many=True)


class CropBoxes(Step, frozen=True, kw_only=True):
    """Cut each box [n, 4] out of a picture. The result is a list with one picture for each box, in order.

    Left and top edges are rounded down, right and bottom edges up, and all are clipped to the picture. A box without pixels gives the
    nearest pixel of the picture.
    """

    inputs: ClassVar[tuple[str, ...]] = ("image", "boxes")
    outputs: ClassVar[tuple[str, ...]] = ("crops",)

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A list of pictures. Raises InvalidConfig if an input has another type."""
        check_array("crop_boxes", "boxes", inputs, (-1, 4))
        return {"crops": _crops_type(image_type("crop_boxes", inputs, "image"))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The pictures in the boxes."""
        image, boxes = pixels_of(inputs["image"], "image"), boxes_of(inputs["boxes"])
        size = np.array(image.shape[1::-1])
        starts = np.floor(boxes[:, :2]).clip(0, size - 1).astype(np.int64)
        ends = np.ceil(boxes[:, 2:]).clip(starts + 1, size).astype(np.int64)
        cut = zip(starts.tolist(), ends.tolist(), strict=True)
        return {"crops": [np.ascontiguousarray(image[top:bottom, left:right]) for (left, top), (right, bottom) in cut]}


class WarpBoxes(Step, frozen=True, kw_only=True):
    """Cut each quadrilateral [n, 4, 2] out of a picture, and straighten it. The result is a list of pictures, in order.

    The corners are top left, top right, bottom right, bottom left. Width and height are the longer of the two opposite sides. The
    pixels are those of ``cv2.warpPerspective`` with INTER_CUBIC and BORDER_REPLICATE, as in PaddleOCR.
    """

    inputs: ClassVar[tuple[str, ...]] = ("image", "boxes")
    outputs: ClassVar[tuple[str, ...]] = ("crops",)

    turn_tall: bool = True
    """Turn a result to the left by 90 degrees if its height is at least 1.5 times its width, for vertical text."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A list of pictures. Raises InvalidConfig if an input has another type."""
        check_array("warp_boxes", "boxes", inputs, (-1, 4, 2))
        return {"crops": _crops_type(image_type("warp_boxes", inputs, "image"))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The straightened pictures. Raises InvalidInput if a side is longer than 32766 pixels."""
        image, boxes = pixels_of(inputs["image"], "image"), boxes_of(inputs["boxes"], quads=True)
        if boxes.ndim != 3:
            raise InvalidInput(f"'boxes' has the shape {list(boxes.shape)}, not [n, 4, 2]", "use crop_boxes for [n, 4]")
        edges = boxes.take(_NEXT_CORNER, axis=1) - boxes
        sides = np.sqrt(np.add.reduce(edges * edges, axis=2)).tolist()
        pixels = np.ascontiguousarray(image)
        return {
            "crops": [self._straightened(pixels, quad, lengths) for quad, lengths in zip(boxes, sides, strict=True)]
        }

    def _straightened(self, image: Array, quad: Array, sides: list[float]) -> Array:
        wide, high = max(sides[0], sides[2]), max(sides[1], sides[3])
        if max(wide, high, *image.shape[:2]) >= _MAX_SIDE + 1:
            raise InvalidInput(
                f"a box of {wide:.0f} × {high:.0f} pixels is too large to straighten: the limit is {_MAX_SIDE}"
            )
        width, height = int(wide) or 1, int(high) or 1
        corners = np.zeros((4, 2), np.float32)
        corners[1:3, 0], corners[2:, 1] = width, height
        matrix = cv2.getPerspectiveTransform(quad, corners)
        found: Array = cv2.warpPerspective(
            image, matrix, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
        ).reshape(height, width, -1)
        return np.ascontiguousarray(np.rot90(found)) if self.turn_tall and height >= 1.5 * width else found
