"""Softmax and sigmoid."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.pipeline.steps import kernels
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
        """``exp(x) / (1 + exp(x))``, computed in FP32 or FP64, in the input's datatype."""
        return {"value": sigmoid(inputs["value"])}


_ONE = np.ones((), np.float32)
"""As an array without dimensions, because numpy takes longer to convert a number than to add it to a thousand others."""
_ONES = np.ones(4096, np.float32)
"""A product with these is a sum, and takes half the time of one. BLAS uses several threads for longer products."""
_LARGE = 1e30
"""A difference from a greater number may overflow in FP32."""
_MOST_EXPONENT = 88.0
"""The exponential of a greater number may overflow in FP32. The sigmoid of this one rounds to 1, also in FP64."""
_MANY = 16_000
"""Number of exponentials from which ONNX Runtime takes less time than numpy."""
_LONGEST = 1024
"""Longest row whose sum ONNX Runtime computes about as exactly as numpy, which adds pairs of sums."""


def softmax(logits: Array, axis: int = -1) -> Array:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``. In C order, a row has the same result with any number of others."""
    if not logits.size:
        return logits
    wide = widened(logits)
    found: Array
    if wide.ndim > 1:
        found = _of_rows(wide) if _is_for_kernel(wide, axis) else _of_any(wide, axis)
    elif -_LARGE < (best := wide[wide.argmax(), ...]).item() < _LARGE:
        found = wide - best
        np.exp(found, found)
        total = found.dot(_ONES[: found.size]) if found.size <= _ONES.size else np.add.reduce(found)
        np.divide(found, total, found)
    else:
        found = _of_any(wide, axis)
    return found if wide is logits else found.astype(logits.dtype)


def sigmoid(logits: Array) -> Array:
    """``exp(x) / (1 + exp(x))``, which is exact to some units in the last place for small results too."""
    if not logits.size:
        return logits
    if logits.flags.fnc:  # columns are contiguous
        return sigmoid(logits.T).T
    wide = widened(logits)
    if not wide.item(wide.argmax()) < _MOST_EXPONENT:  # greater, or NaN
        wide = wide.clip(-np.inf, _MOST_EXPONENT)
    found: Array = np.exp(wide) if wide.size < _MANY else _exp(wide)
    np.divide(found, found + _ONE, found)
    return found if found.dtype == logits.dtype else found.astype(logits.dtype)


def widened(numbers: Array) -> Array:
    """``numbers``, in FP32 if they are of FP16 or BF16, in which sums would lose most of their terms."""
    return numbers if numbers.dtype in (np.float32, np.float64) else numbers.astype(np.float32)


def _is_for_kernel(logits: Array, axis: int) -> bool:
    """The decision does not depend on the number of rows, so that rows do not change each other's results."""
    is_short = logits.shape[-1] <= _LONGEST and axis in (-1, logits.ndim - 1)
    return is_short and logits.dtype == np.float32 and kernels.keep_nan()


def _of_rows(logits: Array) -> Array:
    found = kernels.softmax(logits)
    if kernels.keep_subnormals() or found.item(found.argmin()) > 0:  # NaN counts as a minimum
        return found
    inexact = ~(found.min(axis=-1) > 0)
    found[inexact] = _of_any(logits[inexact], -1)
    return found


def _of_any(logits: Array, axis: int) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = logits - np.maximum.reduce(logits, axis, keepdims=True)
        found = np.exp(found, found) if found.shape[axis] < _MANY else _exp(found)  # of few rows as of many
        found /= np.add.reduce(found, axis, keepdims=True)
    return found


def _exp(numbers: Array) -> Array:
    if numbers.dtype == np.float32 and numbers.flags.c_contiguous and kernels.keep_nan():
        return kernels.exp(numbers)
    found: Array = np.exp(numbers)
    return found
