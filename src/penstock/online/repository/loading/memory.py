"""Memory and processor time that loading and unloading models takes from others."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOW = 10
"""A tenth of the processor time of a thread of the usual priority, where both want a core."""
_M_ARENA_MAX = -8
_loading: set[int] = set()
"""Threads that load something now."""


def share_arenas(cores: int) -> None:
    """Have the C library make one arena for each of ``cores``, at least two, and not eight: each keeps some megabytes of every model
    that a thread has loaded there, which ``give_back`` does not reach."""
    if set_option := _c_function("mallopt"):
        set_option(_M_ARENA_MAX, max(2, cores))


def give_back() -> None:
    """Let the C library return what has been freed to the system. Blocks for some milliseconds."""
    if trim := _c_function("malloc_trim"):
        trim(0)


@contextmanager
def low_priority(*, leaves_threads: bool, starts_processes: bool = False) -> Iterator[None]:
    """Work inside gives way to that of other threads, unless what it starts had to give way for ever: processes, or, where this
    process may not raise priorities, threads that go on."""
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
    """Give the threads that were started by one of low priority, which they inherit, the usual one."""
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        with suppress(OSError):  # it has ended
            if thread not in _loading and os.getpriority(os.PRIO_PROCESS, thread) == _LOW:
                os.setpriority(os.PRIO_PROCESS, thread, 0)


@functools.cache
def _can_raise() -> bool:
    """Whether this process may give a thread of low priority the usual one again: most users' may not."""

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
    """None where the C library has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
