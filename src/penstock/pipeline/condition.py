"""The condition of a step: a comparison of a tensor's value with a number."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.tensor import Array

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(not\s+)?([^\s<>=!]+)\s*(?:(<=|>=|==|!=|<|>)\s*(\S+)\s*)?")


class Condition(msgspec.Struct, frozen=True):
    """Holds where ``tensor comparison bound``."""

    tensor: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """From ``TENSOR`` (it is not zero), ``not TENSOR`` (it is zero) or e.g. ``TENSOR >= 0.5``. Raises InvalidConfig."""
        match = _FORM.fullmatch(text)
        if match is not None:
            negation, tensor, comparison, number = match.groups()
            if comparison is None:
                return cls(tensor, "==" if negation else "!=", 0.0)
            try:
                bound = float(number)
            except ValueError:
                bound = math.nan
            if math.isfinite(bound) and not negation:
                return cls(tensor, comparison, bound)
        raise InvalidConfig(
            f"the condition '{text[:100]}' cannot be read", "write 'TENSOR', 'not TENSOR', or e.g. 'TENSOR >= 0.5'"
        )

    def holds(self, array: Array) -> bool:
        """Whether it holds for ``array``, of one element, or of several that agree. Raises InvalidArgument if they do not."""
        if array.dtype.kind == "O" or not array.size:
            raise InvalidArgument(
                f"'{self}' needs a number, and the tensor has {'text' if array.size else 'no element'}"
            )
        found = _COMPARISONS[self.comparison](array.astype(np.float64), self.bound)
        first = bool(found.flat[0])
        if found.size > 1 and not (found == first).all():
            raise InvalidArgument(
                f"'{self}' holds for some rows and not for others",
                "send them in requests of their own: a step runs or not",
            )
        return first

    def excludes(self, other: Condition) -> bool:
        """Whether both can never hold of one request."""
        if self.tensor != other.tensor:
            return False
        # Between and beyond the two bounds nothing changes, so that these points stand for all numbers.
        middle = self.bound / 2 + other.bound / 2
        points = (-math.inf, self.bound, middle, other.bound, math.inf)
        return not any(self._is_met_by(point) and other._is_met_by(point) for point in (*points, math.nan))

    def _is_met_by(self, number: float) -> bool:
        return bool(_COMPARISONS[self.comparison](number, self.bound))

    def __str__(self) -> str:
        return f"{self.tensor} {self.comparison} {self.bound:g}"
