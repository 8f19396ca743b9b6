"""Names of classes, and the checks that steps on scores share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import ml_dtypes
import msgspec
import numpy as np

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, StepResources, wrong_type
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array, DataType

Labels = str | tuple[str, ...]
"""Names of classes: the name of one of the pipeline's lists, or the list."""
_ROUNDING = 0.05
"""Probabilities of a quantised model may lie outside of 0 to 1 by this much."""


class Labelled(Step, frozen=True, kw_only=True):
    """A step that names classes."""

    labels: Labels

    def bound(self, resources: StepResources) -> Self:
        """The step with its list of labels. Raises InvalidConfig if there is none of this name."""
        if isinstance(self.labels, tuple):
            return self
        if self.labels and self.labels not in resources.labels:
            hint = did_you_mean(self.labels, resources.labels) or "add the list to 'labels' of the pipeline"
            raise InvalidConfig(f"there are no labels '{self.labels}'", hint)
        return msgspec.structs.replace(self, labels=resources.labels.get(self.labels, ()))


def names_of(indices: Array, labels: Labels) -> list[str]:
    """The names of the classes ``indices``. Without labels, their numbers as text."""
    if not labels:
        return [str(index) for index in indices.tolist()]
    return [labels[index] for index in indices.tolist()]


def check_labels(step: str, labels: Labels, classes: int) -> None:
    """Raise InvalidConfig unless there are as many ``labels`` as classes. With -1, the number of classes is unknown."""
    if isinstance(labels, tuple) and labels and classes not in (-1, len(labels)):
        raise InvalidConfig(f"step '{step}' has {len(labels)} labels, but the model has {classes} classes")


def class_count(step: str, given: ValueType) -> int:
    """The number of classes of scores with the type ``given``, or -1. Raises InvalidConfig unless only one dimension is not 1."""
    dims = [dim for dim in given.shape if dim != 1]
    if given.many or given.datatype is DataType.BYTES or not given.shape or len(dims) > 1:
        raise wrong_type(step, "value", "an array of scores [classes]", given)
    return dims[0] if dims else 1


def scores_of(value: Value, labels: Labels = ()) -> Array:
    """The scores ``value`` of classes, in one dimension. Raises InvalidInput for several dimensions, NaN and missing labels."""
    scores = comparable(value)
    if scores.ndim != 1:
        if sum(dim != 1 for dim in scores.shape) > 1:
            raise InvalidInput(f"'value' has the shape {list(scores.shape)}, not [classes]")
        scores = scores.reshape(-1)
    if labels and len(labels) != scores.size:
        raise InvalidInput(f"the model returned {scores.size} scores for {len(labels)} labels")
    return scores


def comparable(value: Value, name: str = "value") -> Array:
    """The array ``value``, in FP32 if it is of FP16 or BF16. Raises InvalidInput if it contains NaN, which has no order."""
    array: Array = value
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        array = array.astype(np.float32)
    if array.dtype.kind == "f" and array.size and math.isnan(array.item(array.argmax())):  # NaN counts as a maximum
        raise InvalidInput(f"'{name}' contains NaN", "check the model's inputs: they may be NaN or infinite")
    return array


def check_probabilities(values: Array, name: str, hint: str) -> None:
    """Raise InvalidInput with ``hint`` as the fix if a number in ``values`` is less than 0 or greater than 1, as most logits are."""
    least, greatest = float(np.min(values, initial=0)), float(np.max(values, initial=0))
    wrong = greatest if greatest > 1 + _ROUNDING else least
    if wrong > 1 or wrong < -_ROUNDING:
        raise InvalidInput(f"'{name}' contains {wrong:.4g}, which is no probability", hint)


def score_type(datatype: DataType, shape: Sequence[int]) -> ValueType:
    """The type of scores that were ``datatype`` in the model: FP32 instead of FP16 and BF16."""
    half = datatype in (DataType.FP16, DataType.BF16)
    return ValueType(datatype=DataType.FP32 if half else datatype, shape=tuple(shape))
