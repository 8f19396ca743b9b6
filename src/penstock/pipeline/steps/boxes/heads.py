"""Decode the raw outputs of common detectors to boxes, scores and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.boxes.arrays import DETECTIONS, check_array, corners, matrix_of
from penstock.pipeline.steps.scores.activations import sigmoid, softmax
from penstock.pipeline.steps.scores.labels import check_probabilities, comparable
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]

_LOGITS_HINT = "if the model returns logits, set 'activation: sigmoid'; otherwise, check 'version'"


class _Head(Step, frozen=True, kw_only=True):
    outputs: ClassVar[tuple[str, ...]] = ("boxes", "scores", "classes")

    threshold: Probability = 0.25
    """Boxes with a lower score are dropped."""

    def _detected(self, centres: Array, probabilities: Array) -> dict[str, Value]:
        """The boxes whose best class reaches the threshold."""
        if not probabilities.shape[1]:
            raise InvalidInput("the model's output has no classes")
        if probabilities.strides[0] < probabilities.strides[1]:
            scores = probabilities.max(axis=1)
        else:  # numpy is faster to find the place of a maximum in a short row than the maximum
            scores = np.take_along_axis(probabilities, probabilities.argmax(axis=1)[:, None], axis=1)[:, 0]
        kept = np.flatnonzero(scores >= self.threshold)
        return {
            "boxes": corners(centres[kept]),
            "scores": scores[kept],
            "classes": probabilities[kept].argmax(axis=1),
        }


class DecodeYolo(_Head, frozen=True, kw_only=True):
    """Decode the output of a YOLO detector to boxes in pixels of the model's input, each with its best class.

    ``version: v8`` (also YOLO11) is [4 + classes, anchors]: centre, size, and a probability for each class. ``version: v5`` (also v7)
    is [anchors, 5 + classes]: the score is the fifth number, the probability of an object, times that of the class. Exported models
    return probabilities; ``activation: sigmoid`` is for those that return logits.
    """

    version: Literal["v5", "v8"] = "v8"
    """Layout of the output."""
    activation: Literal["none", "sigmoid"] = "none"
    """``sigmoid`` if the model returns logits. With ``none``, a number that is no probability is an error."""
    classes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of classes. If given, an output of another size is an error, such as a transposed one."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of detections. Raises InvalidConfig unless the input has two dimensions, and the right number of classes."""
        size = -1 if self.classes is None else self.classes + (4 if self.version == "v8" else 5)
        check_array("decode_yolo", "value", inputs, (size, -1) if self.version == "v8" else (-1, size))
        return dict(DETECTIONS)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Boxes, scores and classes."""
        rows = matrix_of(inputs["value"], "value")
        rows, first = (rows.T, 4) if self.version == "v8" else (rows, 5)
        classes = rows.shape[1] - first
        if classes < 1 or self.classes not in (None, classes):
            shape = list(inputs["value"].shape)
            raise InvalidInput(
                f"'value' has the shape {shape}, which is not that of YOLO {self.version}", "check 'version'"
            )
        numbers = rows[:, 4:]
        if self.activation == "sigmoid":
            numbers = sigmoid(numbers)
        else:
            check_probabilities(numbers, "value", _LOGITS_HINT)
        return self._detected(rows[:, :4], numbers if self.version == "v8" else numbers[:, 1:] * numbers[:, :1])


class DecodeDetr(_Head, frozen=True, kw_only=True):
    """Decode the outputs of DETR and RT-DETR: ``logits`` [queries, classes], and ``boxes`` [queries, 4].

    ``boxes`` are centre and size, from 0 to 1. The result is also relative to the picture, and ``scale_boxes`` with ``size: [1, 1]``
    turns it into pixels.
    """

    inputs: ClassVar[tuple[str, ...]] = ("logits", "boxes")

    activation: Literal["sigmoid", "softmax", "none"] = "sigmoid"
    """``sigmoid`` for RT-DETR and Deformable DETR, ``softmax`` for DETR, whose last class is that there is no object. ``none`` if the
    model applies a sigmoid itself."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of detections. Raises InvalidConfig if an input has another shape."""
        check_array("decode_detr", "logits", inputs, (-1, -1))
        check_array("decode_detr", "boxes", inputs, (-1, 4))
        return dict(DETECTIONS)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Boxes, scores and classes."""
        logits, boxes = _paired(inputs, "logits", "boxes")
        if self.activation == "softmax":
            return self._detected(boxes, comparable(softmax(logits), "logits")[:, :-1])
        if self.activation == "none":
            check_probabilities(logits, "logits", "set 'activation' to sigmoid or softmax if these are logits")
            return self._detected(boxes, logits)
        if logits.size and logits.min() >= 0 and logits.max() <= 1:
            # As logits, these numbers would make an object of every query.
            hint = "if the model applies a sigmoid itself, set 'activation: none'"
            raise InvalidInput("all numbers in 'logits' are between 0 and 1, as probabilities are", hint)
        return self._detected(boxes, sigmoid(logits))


class DecodeSsd(_Head, frozen=True, kw_only=True):
    """Decode the outputs of SSD: ``logits`` [priors, classes], and ``boxes`` [priors, 4] as offsets from ``priors``.

    ``priors`` [priors, 4] are centre and size of the default boxes. The result has their unit. Class 0 is the background, which the
    result leaves out, so that its classes count from the first object.
    """

    inputs: ClassVar[tuple[str, ...]] = ("logits", "boxes", "priors")

    variances: tuple[float, float] = (0.1, 0.2)
    """Factors of the offsets of centre and size."""
    softmax: bool = True
    """Set to false if the model returns probabilities instead of logits."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Types of detections. Raises InvalidConfig if an input has another shape."""
        check_array("decode_ssd", "logits", inputs, (-1, -1))
        check_array("decode_ssd", "boxes", inputs, (-1, 4))
        check_array("decode_ssd", "priors", inputs, (-1, 4))
        return dict(DETECTIONS)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """Boxes, scores and classes."""
        logits, offsets = _paired(inputs, "logits", "boxes")
        _, priors = _paired(inputs, "logits", "priors")
        if not self.softmax:
            check_probabilities(logits, "logits", "set 'softmax: true' if these are logits")
        probabilities = (comparable(softmax(logits), "logits") if self.softmax else logits)[:, 1:]
        centre, size = np.float32(self.variances[0]), np.float32(self.variances[1])
        with np.errstate(over="ignore", invalid="ignore"):  # of offsets that are infinite
            middles = priors[:, :2] + offsets[:, :2] * centre * priors[:, 2:]
            # An offset of 80 would already be a size of e^16 times the prior; more would overflow.
            sizes = priors[:, 2:] * np.exp(np.minimum(offsets[:, 2:] * size, 80))
        return self._detected(np.concatenate([middles, sizes], axis=1), probabilities)


def _paired(inputs: Mapping[str, Value], scores: str, boxes: str) -> tuple[Array, Array]:
    one, two = matrix_of(inputs[scores], scores), matrix_of(inputs[boxes], boxes)
    if len(one) != len(two) or two.shape[1] != 4:
        raise InvalidInput(
            f"'{scores}' has the shape {list(one.shape)}, and '{boxes}' {list(two.shape)}, not [{len(one)}, 4]"
        )
    return one, two
