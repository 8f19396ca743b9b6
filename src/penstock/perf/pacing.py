"""Arrival times of a Poisson process, and a precise timer."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

_CLOCK_MONOTONIC = 1
_CHUNK = 4096


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds after the start, without end. The gaps are exponential with mean ``1 / rate``."""
    generator = np.random.default_rng(seed)
    at = 0.0
    while True:
        times = at + np.cumsum(generator.exponential(1 / rate, _CHUNK))
        yield from times.tolist()
        at = float(times[-1])


class PreciseTimer:
    """A timer with the resolution of the kernel's timers. It calls back once after each ``arm``.

    Event loops round times to milliseconds, which is too coarse for small models. This timer uses a ``timerfd`` on Linux and the event
    loop's timer on other systems.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._expired)

    def arm(self, delay_s: float) -> None:
        """Call back in ``delay_s`` seconds. This cancels an earlier pending callback."""
        if self._fd >= 0:
            self._set(max(1, int(delay_s * 1e9)))
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(0.0, delay_s), self._callback)

    def close(self) -> None:
        """Cancel the callback and free the timer. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        os.read(self._fd, 8)  # resets the timer; otherwise its descriptor would stay readable
        self._callback()

    def _set(self, delay_ns: int) -> None:
        seconds, nanoseconds = divmod(delay_ns, 1_000_000_000)
        setting = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)  # struct itimerspec: interval, then value
        self._libc.timerfd_settime(self._fd, 0, setting, None)
