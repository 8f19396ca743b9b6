"""Limits the memory that stays allocated after models are loaded and unloaded, and the CPU time that this takes from requests."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOW = 10
"""With this niceness, a thread gets a tenth of the CPU time of a normal thread that competes for the same core."""
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_OWN_PAGES_BYTES = 4 << 20
_loading: set[int] = set()
"""Ids of the threads that are loading models."""


def share_arenas(cores: int) -> None:
    """Limit the freed memory that the C library keeps. The library then uses one malloc arena per core (at least two) instead of
    eight, and retains only small buffers.

    For each model that was loaded in an arena, the arena retains a few megabytes that ``give_back`` cannot return.
    """
    if set_option := _c_function("mallopt"):
        set_option(_M_ARENA_MAX, max(2, cores))
        # Buffers above the threshold get pages of their own, which return to the system immediately when freed. Without a fixed
        # threshold, the C library raises it up to 32 MiB; small objects beside a freed buffer then keep its memory in use.
        set_option(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)


def give_back() -> None:
    """Return freed memory from the C library to the system. Blocks for some milliseconds."""
    if trim := _c_function("malloc_trim"):
        trim(0)


@contextmanager
def low_priority(*, leaves_threads: bool, starts_processes: bool = False) -> Iterator[None]:
    """Run the body with low priority.

    The priority stays normal if the body starts processes, because they would inherit the low priority permanently. The priority
    also stays normal if the body starts threads that outlive it, and this process may not raise their priority again.
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
    """Restore the normal priority of threads that inherited the low priority."""
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        with suppress(OSError):  # the thread has ended
            if thread not in _loading and os.getpriority(os.PRIO_PROCESS, thread) == _LOW:
                os.setpriority(os.PRIO_PROCESS, thread, 0)


@functools.cache
def _can_raise() -> bool:
    """True if this process may raise a thread's priority again. Most users lack this permission."""

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
