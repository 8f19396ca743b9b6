"""The condition of a step: a comparison of a tensor's value with a number."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidConfig
from penstock.pipeline.value import Value
from penstock.tensor import Array

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}
_FORM = re.compile(r"\s*(not\s+)?([^\s<>=!]+)\s*(?:(<=|>=|==|!=|<|>)\s*(\S+)\s*)?")


class Condition(msgspec.Struct, frozen=True):
    """The condition ``tensor comparison bound``."""

    tensor: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse ``TENSOR`` (not zero), ``not TENSOR`` (zero) or a comparison, e.g. ``TENSOR >= 0.5``. Raises InvalidConfig."""
        if match := _FORM.fullmatch(text):
            negation, tensor, comparison, number = match.groups()
            if comparison is None:
                return cls(tensor, "==" if negation else "!=", 0.0)
            with suppress(ValueError):
                if math.isfinite(bound := float(number)) and not negation:
                    return cls(tensor, comparison, bound)
        hint = "write 'TENSOR', 'not TENSOR', or e.g. 'TENSOR >= 0.5'"
        raise InvalidConfig(f"the condition '{text[:100]}' cannot be read", hint)

    def holds(self, value: Value) -> bool:
        """True if the condition holds for every element of ``value``. Raises InvalidArgument if it holds for some elements only, or
        if the value is no array of numbers."""
        array: Array = np.asarray(value)
        if array.dtype.kind in "OSU" or not array.size:
            has = "text" if array.size else "no element"
            raise InvalidArgument(f"the condition '{self}' needs a number, but its tensor has {has}")
        found = _COMPARISONS[self.comparison](array, np.float64(self.bound))
        if found.any() and not found.all():
            raise InvalidArgument(f"the condition '{self}' holds for some rows only", "send them in separate requests")
        return bool(found.any())

    def excludes(self, other: Condition) -> bool:
        """True if no request can meet both conditions."""
        # The conditions are constant between the two bounds and beyond them, so these points represent all numbers.
        points = (-math.inf, self.bound, self.bound / 2 + other.bound / 2, other.bound, math.inf, math.nan)
        one, two = _COMPARISONS[self.comparison], _COMPARISONS[other.comparison]
        both = any(one(point, self.bound) and two(point, other.bound) for point in points)
        return self.tensor == other.tensor and not both

    def __str__(self) -> str:
        return f"{self.tensor} {self.comparison} {self.bound:g}"
