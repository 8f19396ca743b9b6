"""Shares the event loop among connections, so that one client's data cannot block the others.

Work is counted in units. A unit is the work for about one frame, or ``UNIT_S`` seconds. The total number of units in one event-loop
iteration is limited. A connection with more work stops reading and waits. Waiting connections take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

UNIT_S = 4e-6
"""Seconds per unit, for work whose time is measured."""
BYTES_A_UNIT = 1 << 12
"""Receiving this number of bytes takes about as long as processing one frame."""
CONTROL_UNITS = 256
"""Units of a control-plane request. With this number, one such request runs per event-loop iteration."""
BEGIN_UNITS = 2
"""Additional units to start a call that is a stream or has a deadline."""
STEP_UNITS = 32
"""Units to start a step on another thread, and to receive its result."""
LOSS_UNITS = 2
"""Units to end a call and notify the service after the connection is lost."""

TURN_UNITS = 256
"""Units per event-loop iteration. Half of them are for waiting connections."""
SLICE_UNITS = 32
"""Minimum units for a turn of a waiting connection."""
PAUSE_UNITS = 256
"""Units that waiting connections may use before the event loop pauses. It pauses only if connections are still waiting."""
PAUSE_S = 5e-5
"""Seconds of the pause, in which other threads can take the interpreter lock. A busy event loop often releases the lock, but takes
it again before a waiting thread has woken up. Without pauses, a model's thread might wait for a hundred iterations."""
MAX_SKIPPED = 4
"""Maximum number of consecutive iterations in which waiting connections may use all units while a request waits."""
FREE_UNITS = 16
"""Units that every connection always gets for newly received data, so that single small requests never wait."""


class TurnTaker(Protocol):
    """A connection with more work than its turn allows."""

    def work(self, units: int) -> int:
        """Continue for about ``units`` units. Returns the units used. Implementations call ``Turns.add`` for another turn."""


class Turns:
    """Distributes units among connections. Used only on the event loop."""

    __slots__ = ("_is_scheduled", "_pause", "_requests", "_skipped", "_unpaused", "_waiting", "left")

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        """``pause`` blocks this thread for the given seconds, and releases the interpreter lock meanwhile."""
        self.left = TURN_UNITS
        """Units left for newly received data. Negative if a step used too many, so that later iterations have fewer units."""
        self._waiting: deque[TurnTaker] = deque()
        self._requests: deque[_Waiter] = deque()  # separate from connections, whose turns are longer
        self._skipped = 0  # iterations without a turn for a request
        self._is_scheduled = False
        self._pause = pause
        self._unpaused = 0  # units that waiting connections have used since the last pause

    def spend(self, units: int) -> None:
        """Record that newly received data took ``units`` units. Callers may omit this for up to ``FREE_UNITS`` units."""
        self.left -= units
        self._schedule()

    def add(self, worker: TurnTaker) -> None:
        """Let ``worker`` continue in a later iteration."""
        self._waiting.append(worker)
        self._schedule()

    async def wait(self, units: int) -> None:
        """Wait for a turn of about ``units`` units, on behalf of one request. Waiting connections come first."""
        waiter = _Waiter(units)
        self._requests.append(waiter)
        self._schedule()
        await waiter.begun

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_scheduled = False
        self.left = min(TURN_UNITS, self.left + TURN_UNITS)
        try:
            self._distribute()
        finally:  # a connection that fails must not hold up the others
            is_behind = bool(self._waiting or self._requests)
            if is_behind or self.left < TURN_UNITS:
                self._schedule()
        if is_behind and self._unpaused >= PAUSE_UNITS:
            self._unpaused = 0
            self._pause(PAUSE_S)

    def _distribute(self) -> None:
        """Give turns to connections, and to one request."""
        count = len(self._waiting)
        share = max(SLICE_UNITS, TURN_UNITS // 2 // max(1, count))
        for _ in range(count):
            if self.left <= TURN_UNITS // 2:
                break
            used = self._waiting.popleft().work(share)
            self.left -= used
            self._unpaused += used
        if self._requests:
            self._begin_request()

    def _begin_request(self) -> None:
        """Give a turn to one request if connections have left units for it, or have left no units for too many iterations."""
        if self.left <= TURN_UNITS // 2 and self._skipped < MAX_SKIPPED:
            self._skipped += 1
            return
        self._skipped = 0
        used = self._requests.popleft().begin()
        self.left -= used
        self._unpaused += used


class _Waiter:
    """Takes one turn on behalf of a coroutine."""

    __slots__ = ("_units", "begun")

    def __init__(self, units: int) -> None:
        self._units = units
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> int:
        """Let the coroutine continue. Returns the units that it uses."""
        if self.begun.done():
            return 0
        self.begun.set_result(None)
        return self._units
