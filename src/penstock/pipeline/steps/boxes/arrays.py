"""The form of boxes between steps, and the checks that steps on boxes share."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import wrong_type
from penstock.pipeline.steps.scores.labels import comparable
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType

DETECTIONS = {
    "boxes": ValueType(shape=(-1, 4)),
    "scores": ValueType(shape=(-1,)),
    "classes": ValueType(datatype=DataType.INT64, shape=(-1,)),
}
"""Types of detections: boxes, and their scores and classes."""


def check_array(step: str, name: str, inputs: Mapping[str, ValueType], *shapes: tuple[int, ...]) -> ValueType:
    """The type of the floating-point input ``name``. Raises InvalidConfig unless it fits one of ``shapes``."""
    given = inputs[name]
    is_float = not given.many and given.datatype in (DataType.FP16, DataType.FP32, DataType.FP64, DataType.BF16)
    if not is_float or not any(given.fits(ValueType(given.media, given.datatype, shape)) for shape in shapes):
        wanted = " or ".join(str(["n" if dim == -1 else dim for dim in shape]).replace("'", "") for shape in shapes)
        raise wrong_type(step, name, f"floating-point numbers {wanted}", given)
    return given


def boxes_of(value: Value, *, quads: bool = False) -> Array:
    """The boxes ``value`` in FP32. Raises InvalidInput if a coordinate is not finite, or if they have another shape."""
    boxes: Array = np.asarray(value, np.float32)
    is_quads = quads and boxes.ndim == 3 and boxes.shape[1:] == (4, 2)
    if not is_quads and (boxes.ndim != 2 or boxes.shape[1] != 4):
        also = " or [n, 4, 2]" if quads else ""
        raise InvalidInput(f"'boxes' has the shape {list(boxes.shape)}, not [n, 4]{also}")
    if boxes.size and not -math.inf < boxes.item(boxes.argmin()) <= boxes.item(boxes.argmax()) < math.inf:
        raise InvalidInput("'boxes' contains NaN or infinity", "check the model's inputs: they may be NaN or infinite")
    return boxes


def matrix_of(value: Value, name: str) -> Array:
    """The array ``value`` of shape [rows, columns] in FP32. Raises InvalidInput for other shapes and NaN."""
    array = comparable(value, name).astype(np.float32, copy=False)
    if array.ndim != 2:
        raise InvalidInput(f"'{name}' has the shape {list(array.shape)}, not two dimensions")
    return array


def corners(centres: Array) -> Array:
    """Left, top, right, bottom of boxes given as x and y of the centre, width, height."""
    with np.errstate(invalid="ignore"):  # of boxes that are infinite
        half = centres[:, 2:] / 2
        return np.concatenate([centres[:, :2] - half, centres[:, :2] + half], axis=1)
