"""The time by which a build should end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.clock import Clock, SystemClock

_SYSTEM_CLOCK = SystemClock()

IsLate = Callable[[], bool]
"""Returns True when no more time should be spent on optional work."""


def never_late() -> bool:
    """``IsLate`` for work without a time limit."""
    return False


class BuildDeadline:
    """Ends ``budget_s`` seconds after its creation, or when ``expire`` is called.

    Work that is not necessary for a result asks ``is_past`` before each step, so the last step may end later.
    """

    def __init__(self, budget_s: float = math.inf, clock: Clock = _SYSTEM_CLOCK) -> None:
        self.budget_s = budget_s
        self._clock = clock
        self._start = clock.now()
        self.interrupted = False
        """True after ``expire``."""
        self.has_result = False
        """True when the build has measured a candidate, so that ending it early gives a result."""

    @property
    def used_s(self) -> float:
        """Seconds since the creation, without pauses."""
        return self._clock.now() - self._start

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return 0.0 if self.interrupted else max(0.0, self.budget_s - self.used_s)

    def is_past(self, share: float = 1.0) -> bool:
        """True if the fraction ``share`` of the budget is used up."""
        return self.interrupted or self.used_s >= share * self.budget_s

    @property
    def why_late(self) -> str:
        """Why there is no more time, as part of a sentence."""
        return "the build was interrupted" if self.interrupted else "there was no time within --budget"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count."""
        start = self._clock.now()
        try:
            yield
        finally:
            self._start += self._clock.now() - start

    def expire(self) -> None:
        """End the budget now. The build then finishes with what it has measured."""
        self.interrupted = True
