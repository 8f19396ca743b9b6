"""Scaling, finding, cutting and drawing of boxes."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.contours import ContourBoxes
from penstock.pipeline.steps.boxes.cut import CropBoxes, WarpBoxes
from penstock.pipeline.steps.boxes.draw import Draw
from penstock.pipeline.steps.boxes.scale import ScaleBoxes
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
BOXES, QUADS = ValueType(shape=(-1, 4)), ValueType(shape=(-1, 4, 2))
LISTED = ValueType(Media.TEXT, DataType.BYTES, many=True)


def ultralytics_scale_boxes(size: tuple[int, int], boxes: Array, shape: tuple[int, int]) -> Array:
    """``scale_boxes`` of Ultralytics, line by line."""
    gain = min(size[0] / shape[0], size[1] / shape[1])
    pad_x = round((size[1] - round(shape[1] * gain)) / 2 - 0.1)
    pad_y = round((size[0] - round(shape[0] * gain)) / 2 - 0.1)
    boxes = (boxes.astype(np.float64) - (pad_x, pad_y, pad_x, pad_y)) / gain
    return boxes.clip(0, (shape[1], shape[0], shape[1], shape[0]))


def some_boxes(count: int, seed: int, largest: float = 100) -> Array:
    """Random boxes, also outside of a picture and with edges in the wrong order."""
    return ((np.random.default_rng(seed).random((count, 4)) - 0.2) * largest).astype(np.float32)


@settings(deadline=None)
@given(
    st.tuples(st.integers(1, 99), st.integers(1, 99)),
    st.tuples(st.integers(64, 99), st.integers(64, 99)),
    st.integers(0, 5),
)
def test_boxes_return_through_a_letterbox(shape: tuple[int, int], size: tuple[int, int], count: int) -> None:
    boxes, image = some_boxes(count, count), np.zeros((*shape, 3), np.uint8)
    gain = min(size[0] / shape[0], size[1] / shape[1])
    found = ScaleBoxes(size=size, letterbox="ultralytics").run({"boxes": boxes, "image": image})["boxes"]
    assert found.dtype == np.float32
    if min(round(shape[0] * gain), round(shape[1] * gain)):
        np.testing.assert_allclose(found, ultralytics_scale_boxes(size, boxes, shape), atol=1e-4)
    found = ScaleBoxes(size=size, letterbox="yolox").run({"boxes": boxes, "image": image})["boxes"]
    np.testing.assert_allclose(found, (boxes / gain).clip(0, (shape[1], shape[0]) * 2), atol=1e-3)
    found = ScaleBoxes(size=size).run({"boxes": boxes.reshape(-1, 4), "image": image})["boxes"]
    scale = np.array([shape[1] / size[1], shape[0] / size[0]] * 2)
    np.testing.assert_allclose(found, (boxes * scale).clip(0, (shape[1], shape[0]) * 2), atol=1e-3)


def test_relative_boxes_and_quadrilaterals_are_scaled() -> None:
    image = np.zeros((50, 100, 3), np.uint8)
    found = ScaleBoxes(size=(1, 1)).run({"boxes": np.array([[0.5, 0.5, 1, 2]], np.float32), "image": image})["boxes"]
    assert found.tolist() == [[50, 25, 100, 50]]
    quad = np.array([[[0, 0], [20, 0], [20, 10], [0, 10]]], np.float32)
    found = ScaleBoxes(size=(100, 100)).run({"boxes": quad, "image": image})["boxes"]
    assert found.tolist() == [[[0, 0], [20, 0], [20, 5], [0, 5]]]
    assert ScaleBoxes(size=(1, 1)).check({"boxes": QUADS, "image": IMAGE})["boxes"] == QUADS
    with pytest.raises(InvalidConfig, match=r"\[n, 4\] or \[n, 4, 2\]"):
        ScaleBoxes(size=(1, 1)).check({"boxes": ValueType(shape=(-1, 3)), "image": IMAGE})


def rectangle(
    centre: tuple[float, float], size: tuple[float, float], angle: float, shape: tuple[int, int] = (120, 160)
) -> Array:
    """A probability map with a rectangle of 0.9."""
    chart = np.zeros(shape, np.float32)
    cv2.fillPoly(chart, [np.round(cv2.boxPoints((centre, size, angle))).astype(np.int32)], [0.9])
    return chart


@settings(deadline=None)
@given(st.integers(-40, 40), st.integers(24, 50), st.integers(8, 16))
def test_a_rectangle_is_found_and_enlarged(angle: int, width: int, height: int) -> None:
    chart = rectangle((80, 60), (width, height), angle)
    found = ContourBoxes(unclip=1.5).run({"value": chart})
    assert found["boxes"].shape == (1, 4, 2)
    assert found["scores"][0] > 0.7
    contours, _ = cv2.findContours((chart > 0.3).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    short, long = sorted(cv2.minAreaRect(contours[0])[1])
    distance = long * short * 1.5 / (2 * (long + short))
    sides = np.linalg.norm(found["boxes"][0] - np.roll(found["boxes"][0], -1, 0), axis=1)
    np.testing.assert_allclose(sides, [long + 2 * distance, short + 2 * distance] * 2, atol=0.01)
    np.testing.assert_allclose(found["boxes"][0].mean(0), (80, 60), atol=1.5)
    assert found["boxes"][0].sum(1).argmin() == 0, "the first corner is the top left"


def test_regions_are_in_reading_order_and_filtered() -> None:
    chart = np.zeros((60, 100), np.float32)
    chart[40:50, 10:40] = chart[5:15, 60:90] = chart[5:15, 5:35] = 0.8
    chart[25:35, 10:40] = 0.4  # under box_threshold
    chart[20, 50] = 1  # too small
    found = ContourBoxes().run({"value": chart[None]})
    assert [box[0].tolist() < [40, 60] for box in found["boxes"]] == [True, False, True]
    np.testing.assert_allclose(found["scores"], [0.8] * 3, atol=0.05)
    assert found["boxes"][2][:, 1].min() > 30


@pytest.mark.parametrize(
    "chart", [np.zeros((1, 1)), np.ones((1, 1)), np.ones((2, 500)), np.zeros((30, 30)), np.ones((40, 40))]
)
def test_every_map_has_a_result(chart: Array) -> None:
    found = ContourBoxes().run({"value": chart.astype(np.float32)})
    assert found["boxes"].shape == (len(found["scores"]), 4, 2)
    assert len(found["boxes"]) == (chart.shape == (40, 40))


def test_a_map_needs_two_dimensions() -> None:
    assert ContourBoxes().check({"value": ValueType(shape=(1, -1, -1))})["boxes"] == QUADS
    with pytest.raises(InvalidConfig, match=r"\[height, width\]"):
        ContourBoxes().check({"value": ValueType(shape=(2, -1, -1))})
    with pytest.raises(InvalidInput, match="NaN"):
        ContourBoxes().run({"value": np.full((3, 3), np.nan, np.float32)})
    with pytest.raises(InvalidInput, match=r"not \[height, width\]"):
        ContourBoxes().run({"value": np.zeros((0, 3), np.float32)})


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


def drawn(pixels: Array, boxes: Array, **inputs: Any) -> Array:
    """The pixels that a viewer shows, which must be the same each time."""
    step = Draw(colour="grey" if pixels.shape[2] == 1 else "rgb")
    file = step.run({"image": pixels, "boxes": boxes, **inputs})["picture"]
    assert file == step.run({"image": pixels, "boxes": boxes, **inputs})["picture"]
    return np.asarray(Image.open(io.BytesIO(file)))


@settings(deadline=None, max_examples=30)
@given(pictures(), st.integers(0, 3), st.integers(0, 99), st.sampled_from([1, 100, 1e30]))
def test_any_boxes_can_be_drawn(pixels: Array, count: int, seed: int, largest: float) -> None:
    labels = ["cat", "", "猫 🐱\nmore" * 99][:count]
    boxes = some_boxes(count, seed, largest)
    found = drawn(pixels, boxes, labels=labels, scores=np.linspace(0, 1, count, dtype=np.float32))
    assert found.shape == (*pixels.shape[:2], 3)
    if not count:
        np.testing.assert_array_equal(found, np.broadcast_to(pixels, found.shape))


def test_a_box_is_where_it_was_found() -> None:
    found = drawn(np.zeros((100, 100, 3), np.uint8), np.array([[20, 30, 70, 80]], np.float32))
    rows, columns = np.nonzero(found.any(axis=2))
    assert abs(rows.min() - 30) <= 1
    assert abs(rows.max() - 80) <= 1
    assert abs(columns.min() - 20) <= 1
    assert abs(columns.max() - 70) <= 1
    assert not found[40:70, 30:60].any()


def test_drawing_needs_as_many_labels_as_boxes() -> None:
    with pytest.raises(InvalidInput, match="1 boxes, but 2 labels"):
        drawn(random_pixels(9, 9), np.zeros((1, 4), np.float32), labels=["a", "b"])
    with pytest.raises(InvalidInput, match=r"3 channels, not 1 \(grey\)"):
        Draw(colour="grey").run({"image": random_pixels(9, 9), "boxes": np.zeros((1, 4), np.float32)})
    assert Draw().check({"image": IMAGE, "boxes": BOXES, "labels": LISTED})["picture"] == FILE
    with pytest.raises(InvalidConfig, match="a list of text"):
        Draw().check({"image": IMAGE, "boxes": BOXES, "labels": TEXT})
