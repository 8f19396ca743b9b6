"""Clocks. Code that depends on time takes a clock as an argument, so that tests do not sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds; only differences are meaningful."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that changes only when ``advance`` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time by ``seconds`` (>= 0)."""
        if seconds < 0:
            raise ValueError("time cannot run backwards")
        self._now += seconds
