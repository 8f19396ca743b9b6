"""Boxes return to the picture."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.boxes.scale import ScaleBoxes
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType
from pictures import some_boxes

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
QUADS = ValueType(shape=(-1, 4, 2))


def ultralytics_scale_boxes(size: tuple[int, int], boxes: Array, shape: tuple[int, int]) -> Array:
    """``scale_boxes`` of Ultralytics, line by line."""
    gain = min(size[0] / shape[0], size[1] / shape[1])
    pad_x = round((size[1] - round(shape[1] * gain)) / 2 - 0.1)
    pad_y = round((size[0] - round(shape[0] * gain)) / 2 - 0.1)
    boxes = (boxes.astype(np.float64) - (pad_x, pad_y, pad_x, pad_y)) / gain
    return boxes.clip(0, (shape[1], shape[0], shape[1], shape[0]))


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
