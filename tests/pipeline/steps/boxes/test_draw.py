"""Boxes on pictures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.draw import Draw
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels, some_boxes

IMAGE = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
BOXES = ValueType(shape=(-1, 4))
LISTED = ValueType(Media.TEXT, DataType.BYTES, many=True)


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
