"""Predicts the time of a call from the newest calls."""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median

_KEPT = 15
_NEWEST = 5
"""Calls of one size that decide: few, so that the estimate follows a link that changes."""
_SAME_SIZE = 1.25
"""Sizes within this ratio count as one size."""


class Estimate:
    """The seconds of a call as a line over its bytes, by the medians of Theil and Sen, so that single slow calls do not matter.

    Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, size: int, seconds: float) -> None:
        """Record a call that moved ``size`` bytes."""
        self._calls.append((size, seconds))

    @property
    def newest_s(self) -> float | None:
        """The seconds of the newest call; None before the first."""
        return self._calls[-1][1] if self._calls else None

    def seconds(self, size: int) -> float | None:
        """The predicted seconds of a call of ``size`` bytes; None before the first call."""
        if not self._calls:
            return None
        newest = list(self._calls)[-_NEWEST:]
        sizes = [one for one, _ in self._calls]
        if max(*sizes, size) <= _SAME_SIZE * min(*sizes, size):
            return median(seconds for _, seconds in newest)
        slopes = [(t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in combinations(self._calls, 2) if s1 != s2]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        return max(0.0, median(seconds - slope * one for one, seconds in newest)) + slope * size
