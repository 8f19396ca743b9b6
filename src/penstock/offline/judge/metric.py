"""A metric: how good answers are, compared with labels or with the original's answers.

A metric is a pure function of one output and its truth, both with one row per sample. It returns one score per row, whose mean is the
metric, or a single number. ``metric_table.py`` has all metrics by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from penstock.tensor import Array

Function = Callable[[Array, Array], "Array | float"]
"""Maps outputs and labels to one score per row, or to a single score for all rows."""


class AccuracyMetric(msgspec.Struct, frozen=True):
    """One metric, and what it needs."""

    name: str
    of: Function
    """Its docstring states the shapes and the source."""
    shapes: str
    """The shapes of the output and of the labels, for people."""
    fits: Callable[[Array, Array | None], bool]
    """True if an output and labels have suitable shapes and types."""
    truth: Callable[[Array], Array] | None = None
    """The truth, without labels, from the original's output. None if labels are required."""
    labels: bool = True
    """False if labels are never used."""
    higher: bool = True
    """True if higher is better."""
    relative: bool = False
    """True if a loss is a fraction of the original's value; otherwise it is a difference."""
    span: tuple[float, float] | None = None
    """The range of a row's score; None for a single number or an unlimited range, whose intervals are approximate."""
    kind: Literal["classes", "numbers", "other"] = "other"
    """How far an output is from the original's: the share of changed classes, the relative error, or the metric with the original's
    answers as truth."""

    @property
    def is_share(self) -> bool:
        """True if values are shown in per cent."""
        return self.higher and self.span == (0.0, 1.0)


def itself(output: Array) -> Array:
    """The truth of metrics that compare numbers or text with the original's."""
    return output
