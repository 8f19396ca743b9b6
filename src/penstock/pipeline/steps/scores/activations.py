"""Softmax and sigmoid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array


class _Activation(Step, frozen=True, kw_only=True):
    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type of the input. Raises InvalidConfig unless it is an array of floating-point numbers."""
        given = inputs["value"]
        if given.many or not given.datatype.is_float or not given.shape:
            raise wrong_type(type(self).__name__.lower(), "value", "an array of floating-point numbers", given)
        return {"value": given}


class Softmax(_Activation, frozen=True, kw_only=True):
    """Turn logits into probabilities that sum to 1."""

    axis: int = -1
    """Axis over which the probabilities sum to 1."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type of the input. Raises InvalidConfig unless it is an array of floating-point numbers that has the axis."""
        found, rank = super().check(inputs), len(inputs["value"].shape)
        if not -rank <= self.axis < rank:
            raise wrong_type("softmax", "value", f"an array with axis {self.axis}", inputs["value"])
        return found

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``, in the input's datatype."""
        return {"value": softmax(inputs["value"], self.axis)}


class Sigmoid(_Activation, frozen=True, kw_only=True):
    """Turn logits into independent probabilities."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``1 / (1 + exp(-x))``, computed in FP32 or FP64, in the input's datatype."""
        return {"value": sigmoid(inputs["value"])}


def softmax(logits: Array, axis: int = -1) -> Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``."""
    if not logits.size:
        return logits
    with np.errstate(invalid="ignore"):  # the result for infinity is NaN
        found: Array = logits - logits.max(axis=axis, keepdims=True)
        np.exp(found, out=found)
        found /= found.sum(axis=axis, keepdims=True)
    return found


def sigmoid(logits: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    found: Array = np.negative(logits.astype(np.promote_types(logits.dtype, np.float32), copy=False))
    with np.errstate(over="ignore"):  # the result is 0
        np.exp(found, out=found)
    found += 1
    np.divide(1, found, out=found)
    return found.astype(logits.dtype, copy=False)
