"""A constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import TEXT, Media, Value, ValueType
from penstock.tensor import DataType


class Constant(Step, frozen=True, kw_only=True):
    """Produce the same value for every item: a text, or an array of numbers."""

    value: Any
    """A text, a number, or a list of numbers of any depth. Whole numbers become INT64, others FP32."""

    inputs: ClassVar[tuple[str, ...]] = ()

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type of the value. Raises InvalidConfig if it is neither text nor numbers."""
        value = self._read()
        if isinstance(value, str):
            return {"value": TEXT}
        return {"value": ValueType(Media.TENSOR, DataType.from_numpy(value.dtype), value.shape)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The value."""
        return {"value": self._read()}

    def _read(self) -> Value:
        if isinstance(self.value, str):
            return self.value
        try:
            array = np.asarray(self.value)
        except ValueError:
            raise InvalidConfig(
                "a constant is a list of lists of different lengths", "make all rows equally long"
            ) from None
        if array.dtype.kind not in "bif":
            raise InvalidConfig(
                "a constant is neither text nor numbers", "write a text, a number, or a list of numbers"
            )
        if array.dtype.kind != "f":
            return array
        if np.abs(array).max(initial=0) > np.finfo(np.float32).max:
            raise InvalidConfig("a constant is too large for FP32", "write smaller numbers")
        return array.astype(np.float32)
