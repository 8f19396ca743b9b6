"""Limits the memory and processor time that loading and unloading take from requests."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOW = 10
"""A niceness at which a thread gets a tenth of the time of a normal thread while both compete for a core."""
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_OWN_PAGES_BYTES = 4 << 20
_loading: set[int] = set()
"""Ids of the threads that are loading models."""


def share_arenas(cores: int) -> None:
    """Limit the freed memory that the C library keeps. It uses one arena per core (at least two) instead of eight, and keeps only
    small buffers.

    Each arena retains a few megabytes for each model that was loaded in it, and ``give_back`` cannot return them.
    """
    if set_option := _c_function("mallopt"):
        set_option(_M_ARENA_MAX, max(2, cores))
        # Large buffers get separate pages, which return to the system immediately. Without a fixed threshold, the C library raises it
        # up to 32 MiB, and small objects beside a freed buffer then prevent its return.
        set_option(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)


def give_back() -> None:
    """Return freed memory from the C library to the system. Blocks for some milliseconds."""
    if trim := _c_function("malloc_trim"):
        trim(0)


@contextmanager
def low_priority(*, leaves_threads: bool, starts_processes: bool = False) -> Iterator[None]:
    """Run the body with low priority.

    The priority stays normal if the body starts processes, because they would inherit the low priority permanently. It also stays
    normal if the body leaves threads behind whose priority this process may not raise again.
    """
    if starts_processes or (leaves_threads and not _can_raise()):
        yield
        return
    thread = threading.get_native_id()
    _loading.add(thread)
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _LOW)
        yield
    finally:
        _loading.discard(thread)
        if leaves_threads:
            _raise_others()


def _raise_others() -> None:
    """Restore the priority of threads that inherited the low one."""
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        with suppress(OSError):  # it has ended
            if thread not in _loading and os.getpriority(os.PRIO_PROCESS, thread) == _LOW:
                os.setpriority(os.PRIO_PROCESS, thread, 0)


@functools.cache
def _can_raise() -> bool:
    """True if this process may raise a thread's priority again, which most users may not."""

    def attempt() -> None:
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 1)
            os.setpriority(os.PRIO_PROCESS, thread, 0)
            outcome.append(True)

    outcome: list[bool] = []
    trial = threading.Thread(target=attempt)
    trial.start()
    trial.join()
    return bool(outcome)


@functools.cache
def _c_function(name: str) -> Any | None:
    """The C library's function ``name``; None if it has no such function."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
