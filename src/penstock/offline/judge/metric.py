"""A metric: the quality of a model's outputs, compared with labels or with the original's outputs.

A metric is a pure function of one output and its truth, both with one row per sample. The function returns a single number or one
score per row. The value of the metric is that number, or the mean of the scores. ``metric_table.py`` has all metrics by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from penstock.tensor import Array

Function = Callable[..., "Array | float"]
"""Maps outputs and labels to one score per row, or to a single score for all rows. A metric with ``cuts`` also takes ``cut``."""


class AccuracyMetric(msgspec.Struct, frozen=True):
    """One metric, and its requirements."""

    name: str
    of: Function
    """The function. Its docstring states the shapes and the source."""
    shapes: str
    """The shapes of the output and of the labels, as text for messages."""
    fits: Callable[[Array, Array | None], bool]
    """Returns True if an output and labels have shapes and types that the metric accepts."""
    truth: Callable[[Array], Array] | None = None
    """Derives the truth from the original's output if there are no labels. None if labels are required."""
    labels: bool = True
    """False if labels are never used."""
    higher: bool = True
    """True if higher is better."""
    relative: bool = False
    """True if a loss is relative to the original's value; False if it is a difference."""
    span: tuple[float, float] | None = None
    """The range of a row's score. None (single number, or unlimited range) makes intervals approximate."""
    alone: bool = True
    """True if a row's score depends on no other row."""
    cuts: bool = False
    """True if ``of`` takes the cut between two classes, for outputs with a single score per sample, as ``cut``."""
    kind: Literal["classes", "numbers", "other"] = "other"
    """How to measure the deviation of an output: fraction of changed classes, relative error, or the metric itself, with the
    original's output as truth."""

    @property
    def unprovable(self) -> str:
        """Why the bound on a loss is not valid for every number of samples; empty if the bound is valid."""
        if self.span is None:
            return "its intervals are approximate"
        return (
            ""
            if self.alone
            else "its scores depend on the spread of all samples, in which rare large errors may be missing"
        )

    @property
    def is_share(self) -> bool:
        """True if values are displayed in per cent."""
        return self.higher and self.span == (0.0, 1.0)


def itself(output: Array) -> Array:
    """The original's output itself, as the truth of metrics that compare numbers or text."""
    return output
