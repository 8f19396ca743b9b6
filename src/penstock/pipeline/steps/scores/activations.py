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

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``exp(x - max(x)) / sum(exp(x - max(x)))`` along ``axis``, in the input's datatype."""
        logits: Array = inputs["value"]
        if not logits.size:
            return {"value": logits}
        powers = np.exp(logits - logits.max(axis=self.axis, keepdims=True))
        return {"value": powers / powers.sum(axis=self.axis, keepdims=True)}


class Sigmoid(_Activation, frozen=True, kw_only=True):
    """Turn logits into independent probabilities."""

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """``1 / (1 + exp(-x))``, in the input's datatype, without overflow."""
        logits: Array = inputs["value"]
        small = np.exp(-np.abs(logits))
        return {"value": np.where(logits >= 0, 1 / (1 + small), small / (1 + small))}
