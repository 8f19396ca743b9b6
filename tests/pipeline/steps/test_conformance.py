"""What every step on pictures, boxes and scores has to do: read-only inputs, and outputs of the types that it declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.registry import NAMES, step_class
from penstock.pipeline.value import FILE, TEXT, Media, Value, ValueType
from penstock.tensor import DataType
from pictures import encoded, random_pixels

PIXELS = random_pixels(24, 40)
FLAT = np.random.default_rng(0).random((7, 11), np.float32)
BOXES = np.array([[1, 2, 9, 12], [0, 0, 40, 24], [2, 2, 9, 12]], np.float32)
QUADS = np.array([[[1, 1], [20, 2], [20, 12], [1, 11]]], np.float32)
SCORES, CLASSES = np.array([0.5, 0.9, 0.4], np.float32), np.array([1, 0, 1])
LETTERS = tuple("abcdefghij")
MAP = np.pad(np.ones((10, 20), np.float32), 8)
CASES: list[tuple[str, dict[str, Any], dict[str, Value]]] = [
    ("argmax", {}, {"value": FLAT}),
    ("colour", {"source": "rgb", "to": "grey"}, {"value": PIXELS}),
    ("contour_boxes", {}, {"value": MAP}),
    ("crop", {"size": (9, 50)}, {"value": PIXELS}),
    ("crop_boxes", {}, {"image": PIXELS, "boxes": BOXES}),
    ("ctc_decode", {"labels": LETTERS}, {"value": FLAT}),
    ("ctc_decode", {"labels": LETTERS, "beam": 4, "softmax": True}, {"value": FLAT}),
    ("decode_detr", {}, {"logits": FLAT * 9 - 5, "boxes": FLAT[:, :4].copy()}),
    ("decode_detr", {"activation": "none"}, {"logits": FLAT, "boxes": FLAT[:, :4].copy()}),
    ("decode_image", {}, {"value": encoded(PIXELS, "JPEG")}),
    ("decode_image", {"like": "opencv"}, {"value": encoded(PIXELS)}),
    ("decode_image", {"colour": "grey"}, {"value": PIXELS}),
    ("decode_ssd", {}, {"logits": FLAT, "boxes": FLAT[:, :4].copy(), "priors": FLAT[:, 4:8].copy()}),
    ("decode_yolo", {"classes": 3}, {"value": FLAT}),
    ("decode_yolo", {"version": "v5"}, {"value": FLAT}),
    ("decode_yolo", {"activation": "sigmoid"}, {"value": FLAT * 9 - 5}),
    ("draw", {}, {"image": PIXELS, "boxes": BOXES, "labels": ["a", "b", "c"], "scores": SCORES}),
    ("l2_normalise", {}, {"value": FLAT}),
    ("label", {"labels": LETTERS}, {"classes": CLASSES}),
    ("layout", {}, {"value": PIXELS}),
    ("letterbox", {"size": (32, 32)}, {"value": PIXELS}),
    ("nms", {}, {"boxes": BOXES, "scores": SCORES, "classes": CLASSES}),
    ("normalise", {"mean": (0.1, 0.2, 0.3)}, {"value": PIXELS}),
    ("pad_image", {"multiple_of": 7}, {"value": PIXELS}),
    ("pool", {}, {"value": FLAT, "mask": np.array([1, 1, 1, 1, 0, 0, 0])}),
    ("resize", {"shortest": 9}, {"value": PIXELS}),
    ("resize", {"size": (50, 9), "like": "opencv"}, {"value": PIXELS}),
    ("resize", {"size": (50, 9), "like": "torch", "filter": "bicubic"}, {"value": PIXELS}),
    ("resize", {"size": (50, 9), "like": "torch", "filter": "area"}, {"value": PIXELS.astype(np.float32)}),
    ("scale_boxes", {"size": (32, 32), "letterbox": "ultralytics"}, {"boxes": BOXES, "image": PIXELS}),
    ("sigmoid", {}, {"value": FLAT}),
    ("softmax", {}, {"value": FLAT}),
    ("threshold", {"at": 0.5, "labels": LETTERS[:3]}, {"value": SCORES}),
    ("top_k", {"k": 2}, {"value": SCORES}),
    ("warp_boxes", {}, {"image": PIXELS, "boxes": QUADS}),
]


def type_of(value: Value) -> ValueType:
    """The type of a value."""
    if isinstance(value, list):
        one = TEXT if not value or isinstance(value[0], str) else ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3))
        return ValueType(one.media, one.datatype, one.shape, many=True)
    if isinstance(value, bytes | str):
        return FILE if isinstance(value, bytes) else TEXT
    is_picture = value.dtype == np.uint8 and value.ndim == 3
    return ValueType(Media.IMAGE if is_picture else Media.TENSOR, DataType.from_numpy(value.dtype), value.shape)


def locked(inputs: dict[str, Value]) -> dict[str, Value]:
    """``inputs`` that raise if a step writes to them."""
    copies = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    for value in copies.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return copies


def ids() -> Iterator[str]:
    """A name for each case."""
    return (f"{name}-{number}" for number, (name, _, _) in enumerate(CASES))


def made(name: str, options: dict[str, Any]) -> Step:
    """The step ``name``."""
    return step_class(name)(**options)


@pytest.mark.parametrize(("name", "options", "inputs"), CASES, ids=ids())
def test_outputs_have_the_declared_types(name: str, options: dict[str, Any], inputs: dict[str, Value]) -> None:
    step = made(name, options)
    declared = step.check({own: type_of(value) for own, value in inputs.items()})
    found = step.run(locked(inputs))
    assert tuple(declared) == tuple(found) == step.outputs
    for own, value in found.items():
        assert type_of(value).fits(declared[own]), f"{own} is {type_of(value)}, but {declared[own]} is declared"
    again = step.run_many([locked(inputs), locked(inputs)])[1]
    for own, value in found.items():
        one, two = (value, again[own]) if isinstance(value, list) else ([value], [again[own]])
        for first, second in zip(one, two, strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("name", "options", "inputs"), CASES, ids=ids())
def test_other_types_are_refused(name: str, options: dict[str, Any], inputs: dict[str, Value]) -> None:
    types = {own: type_of(value) for own, value in inputs.items()}
    for own in inputs:
        for wrong in (TEXT, ValueType(shape=(2, 3, 4, 5, 6), many=True)):
            with pytest.raises(InvalidConfig, match=f"step '{name}' needs .* as '{own}', but it is"):
                made(name, options).check({**types, own: wrong})


def test_every_step_has_a_case() -> None:
    folders = ("image.", "boxes.", "scores.")
    mine = [
        name
        for name in NAMES
        if step_class(name).__module__.removeprefix("penstock.pipeline.steps.").startswith(folders)
    ]
    assert set(mine) == {name for name, _, _ in CASES}
