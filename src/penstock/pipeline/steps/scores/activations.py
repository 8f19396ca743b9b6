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
    """Turn logits into probabilities that sum to 1.

    A row with NaN or +infinity, or with -infinity only, gives NaN, as ``torch.softmax`` does.
    """

    axis: int = -1
    """Axis over which the probabilities sum to 1."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type of the input. Raises InvalidConfig unless it is an array of floating-point numbers that has the axis."""
        rank = len(inputs["value"].shape)
        if not -rank <= self.axis < rank:
            raise wrong_type("softmax", "value", f"an array with axis {self.axis}", inputs["value"])
        return super().check(inputs)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``, computed in FP32 or FP64, in the input's datatype."""
        return {"value": softmax(inputs["value"], self.axis)}


class Sigmoid(_Activation, frozen=True, kw_only=True):
    """Turn logits into independent probabilities."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``1 / (1 + exp(-x))``, computed in FP32 or FP64, in the input's datatype."""
        return {"value": sigmoid(inputs["value"])}


_ONE = np.ones((), np.float32)
"""As an array without dimensions, because numpy takes longer to convert a number than to add it to a thousand others."""
_SMALL = 4096
"""Number of logits up to which a search for the greatest takes less time than to turn off warnings."""
_LARGE, _MOST_EXPONENT = 1e30, 88.0
"""A difference from a greater number may overflow in FP32, and the exponential of a greater number does."""


def softmax(logits: Array, axis: int = -1) -> Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``."""
    if not logits.size:
        return logits
    wide = widened(logits)
    found: Array
    if wide.ndim == 1 and -_LARGE < (best := wide[wide.argmax(), ...]).item() < _LARGE:
        found = wide - best
        np.exp(found, found)
        np.divide(found, np.add.reduce(found, out=np.empty((), found.dtype)), found)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            found = wide - np.maximum.reduce(wide, axis, keepdims=True)
            np.exp(found, found)
            found /= np.add.reduce(found, axis, keepdims=True)
    return found if wide is logits else found.astype(logits.dtype)


def sigmoid(logits: Array) -> Array:
    """``1 / (1 + exp(-x))``."""
    if not logits.size:
        return logits
    wide = widened(logits)
    found: Array = np.negative(wide)
    if found.size <= _SMALL and found.item(found.argmax()) < _MOST_EXPONENT:
        np.exp(found, found)
    else:
        with np.errstate(over="ignore"):  # the result is 0
            np.exp(found, found)
    np.add(found, _ONE, found)
    np.reciprocal(found, found)
    return found if wide is logits else found.astype(logits.dtype)


def widened(numbers: Array) -> Array:
    """``numbers``, in FP32 if they are of FP16 or BF16, in which sums would lose most of their terms."""
    return numbers if numbers.dtype in (np.float32, np.float64) else numbers.astype(np.float32)
