"""Crops, and straightened quadrilaterals."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.pipeline.steps.boxes.cut import CropBoxes, WarpBoxes
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels, some_boxes

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
BOXES = ValueType(shape=(-1, 4))
QUADS = ValueType(shape=(-1, 4, 2))


@settings(deadline=None)
@given(pictures(), st.integers(0, 6), st.integers(0, 99))
def test_crops_are_parts_of_the_picture(pixels: Array, count: int, seed: int) -> None:
    boxes = some_boxes(count, seed)
    crops = CropBoxes().run({"image": pixels, "boxes": boxes})["crops"]
    assert len(crops) == count
    for crop, (left, top, right, bottom) in zip(crops, np.trunc(boxes), strict=True):
        assert crop.size
        if 0 <= left < right <= pixels.shape[1] and 0 <= top < bottom <= pixels.shape[0]:
            assert crop.shape[0] - (bottom - top) in (0, 1)
            assert crop.shape[1] - (right - left) in (0, 1)
    whole = CropBoxes().run({"image": pixels, "boxes": np.array([[-5, -5, 1e6, 1e6]], np.float32)})["crops"]
    np.testing.assert_array_equal(whole[0], pixels)
    kind = CropBoxes().check({"image": IMAGE, "boxes": BOXES})["crops"]
    assert (kind.many, kind.media, kind.shape) == (True, Media.IMAGE, (-1, -1, 3))


def paddle_rotate_crop(image: Array, points: Array) -> Array:
    """``get_rotate_crop_image`` of PaddleOCR, line by line."""
    width = int(max(np.linalg.norm(points[0] - points[1]), np.linalg.norm(points[2] - points[3])))
    height = int(max(np.linalg.norm(points[0] - points[3]), np.linalg.norm(points[1] - points[2])))
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    matrix = cv2.getPerspectiveTransform(points, target)
    found: Array = cv2.warpPerspective(
        image, matrix, (width, height), borderMode=cv2.BORDER_REPLICATE, flags=cv2.INTER_CUBIC
    )
    return np.rot90(found) if height >= 1.5 * width else found


@settings(deadline=None)
@given(st.integers(0, 500))
def test_warped_boxes_equal_paddle(seed: int) -> None:
    rng, image = np.random.default_rng(seed), random_pixels(60, 80)
    corners = np.array([[10, 10], [60, 10], [60, 40], [10, 40]]) + rng.integers(-9, 9, (4, 2))
    quads = np.stack([corners, corners[:, ::-1]]).astype(np.float32)
    crops = WarpBoxes().run({"image": image, "boxes": quads})["crops"]
    for crop, quad in zip(crops, quads, strict=True):
        np.testing.assert_array_equal(crop, paddle_rotate_crop(image, quad))


def test_boxes_without_area_are_warped_to_a_pixel_and_long_ones_refused() -> None:
    image = random_pixels(10, 10)
    crops = WarpBoxes(turn_tall=False).run({"image": image, "boxes": np.zeros((2, 4, 2), np.float32)})["crops"]
    assert [crop.shape for crop in crops] == [(1, 1, 3)] * 2
    with pytest.raises(InvalidInput, match="too large to straighten"):
        WarpBoxes().run({"image": image, "boxes": np.array([[[0, 0], [1e6, 0], [1e6, 1], [0, 1]]], np.float32)})
    with pytest.raises(InvalidInput, match=r"use crop_boxes for \[n, 4\]"):
        WarpBoxes().run({"image": image, "boxes": np.zeros((1, 4), np.float32)})
    assert WarpBoxes().check({"image": IMAGE, "boxes": QUADS})["crops"].many


@pytest.mark.parametrize(("height", "shape"), [(29, (29, 20)), (30, (20, 30)), (31, (20, 31))])
def test_a_box_is_turned_from_a_ratio_of_one_and_a_half(height: int, shape: tuple[int, int]) -> None:
    quad = np.array([[[5, 5], [25, 5], [25, 5 + height], [5, 5 + height]]], np.float32)
    (crop,) = WarpBoxes().run({"image": np.zeros((60, 60, 3), np.uint8), "boxes": quad})["crops"]
    assert crop.shape[:2] == shape
