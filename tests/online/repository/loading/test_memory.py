"""Loading has low priority, but the threads that it starts do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from penstock.online.repository.loading import memory
from penstock.online.repository.loading.memory import give_back, low_priority


class Waiting:
    """A thread that waits until it is released, as an engine's thread waits for work."""

    def __init__(self) -> None:
        self._end = threading.Event()
        started = threading.Event()

        def run() -> None:
            self.number = threading.get_native_id()
            started.set()
            self._end.wait(20)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert started.wait(20)

    @property
    def priority(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, self.number)

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def priorities(**how: bool) -> tuple[int, int, int]:
    """Priorities of a loading thread, and of a thread that it has started, during the load and afterwards."""
    found: list[int] = []

    def load() -> None:
        with low_priority(**how):
            left = Waiting()
            found.extend((os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), left.priority))
        found.append(left.priority)
        left.end()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return found[0], found[1], found[2]


def test_a_thread_that_loads_gives_way() -> None:
    assert priorities(leaves_threads=False)[0] == 10
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0


@pytest.mark.parametrize("may_raise", [False, True])
def test_threads_that_go_on_do_not_give_way(monkeypatch: pytest.MonkeyPatch, may_raise: bool) -> None:
    if may_raise and os.getuid():
        pytest.skip("only root may")
    monkeypatch.setattr(memory, "_can_raise", lambda: may_raise)
    assert priorities(leaves_threads=True) == ((10, 10, 0) if may_raise else (0, 0, 0))


def test_processes_do_not_give_way() -> None:
    assert priorities(leaves_threads=False, starts_processes=True) == (0, 0, 0)


def test_memory_is_given_back() -> None:
    give_back()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_threads_share_arenas() -> None:
    """glibc reports a heap for each arena."""
    code = (
        "import ctypes, sys, threading; from penstock.online.repository.loading.memory import share_arenas\n"
        "if sys.argv[1:]: share_arenas(int(sys.argv[1]))\n"
        "c, gate = ctypes.CDLL(None), threading.Barrier(6)\n"
        "c.malloc.restype = ctypes.c_void_p\n"
        "work = lambda: (c.malloc(5000), gate.wait(20))\n"
        "threads = [threading.Thread(target=work) for _ in range(6)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "out = c.fdopen; out.restype = ctypes.c_void_p\n"
        "c.malloc_info(0, ctypes.c_void_p(out(1, b'w'))); c.fflush(None)\n"
    )

    def heaps(*arguments: str) -> int:
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.count("<heap nr=")

    assert heaps() > 3
    assert heaps("1") == 2
    assert heaps("3") == 3


def test_large_buffers_return_to_the_system_at_once_whatever_lies_beside_them() -> None:
    program = """
import sys
from penstock.online.repository.loading.memory import share_arenas

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

share_arenas(2)
before, kept = resident(), []
for size in (30, 20, 10, 30, 20, 10):
    buffers = [bytearray(size << 20) for _ in range(3)]
    for buffer in buffers:
        kept.append(bytes(100_000))
    del buffer, buffers
print(resident() - before)
"""
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert int(left) < 16 << 20, "80 MiB without a limit"
