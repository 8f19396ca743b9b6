"""An event loop and a clock that stand still until told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.clock import ManualClock


class Timer(msgspec.Struct, eq=False):
    at: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Turns:
    """Stands for the event loop: holds what was to be called until ``turn``, or until ``advance`` has come to its time."""

    def __init__(self) -> None:
        self.clock = ManualClock(start=1.0)
        self.timers: list[Timer] = []
        self._due: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def now_ns(self) -> int:
        return round(self.clock.now() * 1e9)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._due.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.clock.now() + delay, callback))
        return self.timers[-1]

    def is_closed(self) -> bool:
        return False

    def turn(self) -> None:
        while self._due:
            due, self._due = self._due, []
            for callback, args in due:
                callback(*args)

    def advance(self, seconds: float) -> None:
        """Let time pass, and call what was to be called until then."""
        end = self.clock.now() + seconds
        while self.timers:
            first = min(self.timers, key=lambda timer: timer.at)
            if first.at > end:
                break
            self.timers.remove(first)
            self.clock.advance(max(0.0, first.at - self.clock.now()))
            if not first.cancelled:
                first.callback()
                self.turn()
        self.clock.advance(end - self.clock.now())
        self.turn()
