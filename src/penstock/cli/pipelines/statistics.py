"""Statistics of a pipeline's outputs over many items, such as the frames of a video.

What is counted follows from the declared type of an output, so the same pipeline gives the same statistics for every clip.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

FIRST = ".first"
"""Suffix of the counts of texts that are the first of a list."""
_PERCENTILES = (5, 50, 95)
_MAX_ELEMENTS = 10
"""Number of elements up to which each element of an array has its own statistics."""


def is_single(kind: ValueType) -> bool:
    """True if a value of this type is one text or one number, or a list of one text."""
    if kind.many:
        return kind.media is Media.TEXT and kind.count == 1
    return kind.media is Media.TEXT or (kind.datatype is not DataType.BYTES and math.prod(kind.shape) == 1)


class OutputStatistics:
    """Statistics of the outputs of the types ``kinds``.

    ===============================  ==================================================================================
    output                           statistics
    ===============================  ==================================================================================
    one number                       ``name``
    up to 10 numbers                 ``name[0]``, ``name[1]`` …
    any number of numbers            ``name[0]``, the first of each item, and ``name.length``
    any number of boxes, arrays …    ``name.length``
    one text                         the number of items with each text
    texts                            the same, those in which it is the first (``name.first``), and ``name.length``
    ===============================  ==================================================================================
    """

    def __init__(self, kinds: Mapping[str, ValueType]) -> None:
        self._kinds = kinds
        self.items = 0
        self._numbers: dict[str, array[float]] = {}
        self._texts: dict[str, Counter[str]] = {}

    @property
    def left_out(self) -> dict[str, ValueType]:
        """The outputs without statistics, such as embeddings and files."""
        return {name: kind for name, kind in self._kinds.items() if not _is_counted(kind)}

    def add(self, outputs: Mapping[str, Value]) -> None:
        """Count one item. An output that is absent is not counted."""
        self.items += 1
        for name, value in outputs.items():
            kind = self._kinds[name]
            if kind.media is Media.TEXT:
                self._add_texts(name, kind, value if kind.many else [value])
            elif _is_counted(kind):
                self._add_array(name, kind, value)

    def numbers(self) -> dict[str, dict[str, float]]:
        """Count, mean, minimum, maximum and percentiles of each series of numbers."""
        return {name: _statistics(np.array(values)) for name, values in self._numbers.items()}

    def texts(self) -> dict[str, dict[str, int]]:
        """The number of items with each text, the most frequent first."""
        return {name: dict(counts.most_common()) for name, counts in self._texts.items()}

    def _add_texts(self, name: str, kind: ValueType, texts: Sequence[str]) -> None:
        self._texts.setdefault(name, Counter()).update(set(texts))
        if not is_single(kind):
            self._texts.setdefault(name + FIRST, Counter()).update(texts[:1])
            self._add_number(f"{name}.length", len(texts))

    def _add_array(self, name: str, kind: ValueType, value: Any) -> None:
        if is_single(kind):
            self._add_number(name, np.asarray(value).item())
            return
        is_flat = len(kind.shape) == 1 and not kind.many
        if is_flat:
            for position, number in enumerate(value[: 1 if kind.shape[0] == -1 else None]):
                self._add_number(f"{name}[{position}]", number)
        if kind.many or kind.shape[0] == -1:
            self._add_number(f"{name}.length", len(value))

    def _add_number(self, name: str, number: float) -> None:
        self._numbers.setdefault(name, array("d")).append(float(number))


def _is_counted(kind: ValueType) -> bool:
    if is_single(kind) or kind.many:
        return True
    is_number = kind.datatype is not DataType.BYTES and bool(kind.shape)
    return is_number and (kind.shape[0] == -1 or (len(kind.shape) == 1 and kind.shape[0] <= _MAX_ELEMENTS))


def _statistics(values: Array) -> dict[str, float]:
    ranks = zip((f"p{rank}" for rank in _PERCENTILES), np.percentile(values, _PERCENTILES), strict=True)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        **{name: float(value) for name, value in ranks},
    }
