"""Limits the number of models that load at the same time, and thereby the memory and the CPU time that loading takes.

Only loads that are making progress count, because a load that hangs must not block others:

- A load does not count while its child process uses no CPU time, because a waiting process needs no more memory.
- A load that runs for very long does not count, because it may be an endless loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.25
_IDLE_LOOKS = 4
"""A load no longer counts after this many successive checks without progress."""
_MAX_LOOKS = 40
"""A load no longer counts after this many checks."""
_IDLE_SHARE = 0.01
"""A process that polls uses up to this share of a CPU while it waits."""

_Result = TypeVar("_Result")
CallLater = Callable[[float, Callable[[], None]], object]
"""``loop.call_later``."""


class _Load:
    """A load that holds or has lost its seat."""

    def __init__(self, used_s: Callable[[], float | None]) -> None:
        self._used_s = used_s
        self._before_s = used_s()
        self._looks = self._idle_looks = 0

    @property
    def counts(self) -> bool:
        return self._looks < _MAX_LOOKS and self._idle_looks < _IDLE_LOOKS

    def look(self) -> None:
        """Check whether the load has made progress during the last ``_LOOK_S`` seconds."""
        self._looks += 1
        before_s, self._before_s = self._before_s, self._used_s()
        if before_s is None or self._before_s is None or self._before_s - before_s > _IDLE_SHARE * _LOOK_S:
            self._idle_looks = 0
        else:
            self._idle_looks += 1


class Seats:
    """Starts loads while fewer than ``count`` of them are making progress. Used only on the event loop."""

    def __init__(self, count: int, call_later: CallLater | None = None) -> None:
        """``call_later`` replaces the event loop's method of this name."""
        self.count = count
        self._call_later = call_later
        self._loads: set[_Load] = set()
        self._changed = asyncio.Event()
        self._is_looking = False

    async def begin(
        self, start: Callable[[], asyncio.Future[_Result]], used_s: Callable[[], float | None]
    ) -> asyncio.Future[_Result]:
        """Wait for a free seat, call ``start``, and return its future. The seat is free again when the future is done.

        ``used_s`` is the CPU time that the load's child processes have used so far; None if there are no child processes.
        """
        while sum(load.counts for load in self._loads) >= self.count:
            self._changed.clear()
            await self._changed.wait()
        future = start()
        load = _Load(used_s)
        self._loads.add(load)
        future.add_done_callback(lambda _: self._end(load))
        self._look_later()
        return future

    def _end(self, load: _Load) -> None:
        self._loads.remove(load)
        self._changed.set()

    def _look_later(self) -> None:
        if self._loads and not self._is_looking:
            self._is_looking = True
            (self._call_later or asyncio.get_running_loop().call_later)(_LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        for load in self._loads:
            load.look()
        self._changed.set()
        self._look_later()
