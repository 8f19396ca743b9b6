"""Predicts the time of a call from the calls before."""

from __future__ import annotations

import math
from collections import deque
from itertools import accumulate, combinations
from statistics import fmean, median

_KEPT = 63
"""Calls that the mean is taken of: many, because near the break-even point an error of the mean is an error of the choice."""
_FEWEST = 3
"""Least calls on either side of a change: few, so that a change is followed soon."""
_SURE = 50
"""A change is believed if chance shows one less often than once in so many calls."""
_FITTED = 15
"""Calls that the slope is fitted to. Their pairs are compared at each call."""
_SAME_SIZE = 1.25
"""Sizes within this ratio count as one size."""


class Estimate:
    """The mean seconds of a call as a line over its bytes, over the calls since the last change.

    The slope is the median of the slopes of all pairs (P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau",
    1968), the intercept a mean, because the caller waits for slow calls too. The time has changed if the newest k >= 3 calls are all
    slower, or all faster, than every earlier one: with n calls of one distribution, each happens by chance once in (n choose k) times.
    The earlier calls are then dropped. The first call opens connections and allocates memory, so it counts only until the second.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._is_warm = False
        self._start, self._slope = 0.0, 0.0

    @property
    def calls(self) -> int:
        """Number of calls that the prediction is made of."""
        return len(self._calls)

    def add(self, size: int, seconds: float) -> None:
        """Record a call that moved ``size`` bytes."""
        if len(self._calls) == 1 and not self._is_warm:
            self._calls.clear()
            self._is_warm = True
        self._calls.append((size, seconds))
        self._slope = self._fitted()
        if earlier := self._before_change():
            for _ in range(earlier):
                self._calls.popleft()
            self._slope = self._fitted()
        self._start = max(0.0, fmean(self._starts()))

    def seconds(self, size: int) -> float | None:
        """The predicted seconds of a call of ``size`` bytes; None before the first call."""
        return self._start + self._slope * size if self._calls else None

    def _starts(self) -> list[float]:
        """The seconds of each call less those for its bytes."""
        return [seconds - self._slope * size for size, seconds in self._calls]

    def _before_change(self) -> int:
        """Number of calls before the newest change; 0 if there is none."""
        starts = self._starts()
        lowest, highest = list(accumulate(starts, min)), list(accumulate(starts, max))
        low, high = min(starts[-_FEWEST:]), max(starts[-_FEWEST:])
        for earlier in range(len(starts) - _FEWEST, _FEWEST - 1, -1):
            low, high = min(low, starts[earlier]), max(high, starts[earlier])
            is_apart = low > highest[earlier - 1] or high < lowest[earlier - 1]
            if is_apart and math.comb(len(starts), earlier) >= _SURE:
                return earlier
        return 0

    def _fitted(self) -> float:
        """Seconds per byte; as before if the newest calls have one size."""
        calls = list(self._calls)[-_FITTED:]
        sizes = [size for size, _ in calls]
        if max(sizes) <= _SAME_SIZE * min(sizes):
            return self._slope
        return max(0.0, median((t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in combinations(calls, 2) if s1 != s2))
