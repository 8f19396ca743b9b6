"""Shares the event loop among connections, so that the data of one client cannot keep it from the others.

The work that data causes is counted in units; a unit is about one frame, or ``UNIT_S`` of time. The units of one iteration of the loop
are limited, over all connections. A connection with more to do stops reading and waits, and those that wait take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

UNIT_S = 4e-6
"""The time of one unit, for work that is measured."""
CONTROL_UNITS = 256
"""Units of a request to the control plane: one is answered in an iteration."""
LOSS_UNITS = 2
"""Units for the end of a call whose connection is lost; its service is notified."""

TURN_UNITS = 256
"""Units of one iteration; half of them are for connections that wait."""
SLICE_UNITS = 32
"""Units that a waiting connection gets at least."""
PAUSE_UNITS = 256
"""Units of connections that wait, after which the loop pauses if there are more."""
PAUSE_S = 5e-5
"""The pause, in which other threads take the interpreter's lock. A loop that never idles often releases the lock, but takes it back
before a thread that waits for it has woken up; so a model's thread might wait for a hundred iterations."""
FREE_UNITS = 16
"""Units that every connection gets for data that has just arrived, so that a few small requests never wait for others."""


class TurnTaker(Protocol):
    """A connection with more to do."""

    def work(self, units: int) -> int:
        """Continue with about ``units`` units, and return how many were used. ``Turns.add`` asks for another turn."""


class Turns:
    """Belongs to the event loop."""

    __slots__ = ("_is_scheduled", "_pause", "_unpaused", "_waiting", "left")

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        """``pause`` blocks this thread for some seconds, without the interpreter's lock."""
        self.left = TURN_UNITS
        """Units for data that has just arrived. Negative if a step used too much, which later iterations make up for."""
        self._waiting: deque[TurnTaker] = deque()
        self._is_scheduled = False
        self._pause = pause
        self._unpaused = 0  # units of those that wait since the last pause

    def spend(self, units: int) -> None:
        """Note that data which has just arrived took ``units`` units. May be left out for up to ``FREE_UNITS``."""
        self.left -= units
        self._schedule()

    def add(self, worker: TurnTaker) -> None:
        """Let ``worker`` continue in a later iteration."""
        self._waiting.append(worker)
        self._schedule()

    async def wait(self, units: int) -> None:
        """Wait for a turn, in which the caller takes about ``units``."""
        waiter = _Waiter(units)
        self.add(waiter)
        await waiter.begun

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        self.left = min(TURN_UNITS, self.left + TURN_UNITS)
        count = len(self._waiting)
        share = max(SLICE_UNITS, TURN_UNITS // 2 // max(1, count))
        for _ in range(count):
            if self.left <= TURN_UNITS // 2:
                break
            used = self._waiting.popleft().work(share)
            self.left -= used
            self._unpaused += used
        if self._waiting and self._unpaused >= PAUSE_UNITS:
            self._unpaused = 0
            self._pause(PAUSE_S)
        if self._waiting or self.left < TURN_UNITS:
            self._schedule()


class _Waiter:
    """Takes one turn, for a coroutine."""

    __slots__ = ("_units", "begun")

    def __init__(self, units: int) -> None:
        self._units = units
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def work(self, units: int) -> int:
        if self.begun.done():
            return 0
        self.begun.set_result(None)
        return self._units
