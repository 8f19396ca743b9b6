"""Moves steps that hold the interpreter's lock to processes, if a trial shows that this is faster.

A step first runs on the line's threads. If its calls are long, processes are started, and some calls run on each side in turn.
``next_place`` then decides once, by the measured times, which include waiting for the lock on one side and copying on the other.
"""

from __future__ import annotations

import enum
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.stage import Inputs
from penstock.pipeline.streaming.step_process import StepProcess

_log = logging.getLogger(__name__)

_TRIALS = 8
"""Number of calls on each side before a decision."""
_LONG_S = 0.002
"""Shorter calls stay on threads: starting processes takes about as long as 200 of these."""
_PATIENCE_S = 60.0
_GAIN = 0.8
"""A step moves if its time on a process is below this fraction of its time on a thread."""


class Place(enum.Enum):
    """Where the next call of a step runs, and whether that is decided."""

    THREAD = enum.auto()
    PROCESS = enum.auto()
    THREAD_FOREVER = enum.auto()
    PROCESS_FOREVER = enum.auto()


def next_place(on_thread: Sequence[float], on_process: Sequence[float], is_ready: bool) -> Place:
    """Where the next call should run, given the seconds of the calls so far. ``is_ready`` is true once processes are running."""
    if len(on_thread) < _TRIALS:
        return Place.THREAD
    if median(on_thread) < _LONG_S:
        return Place.THREAD_FOREVER
    if not is_ready:
        return Place.THREAD
    if len(on_process) < _TRIALS:
        return Place.PROCESS if len(on_process) <= len(on_thread) - _TRIALS else Place.THREAD
    is_faster = median(on_process) < _GAIN * median(on_thread[-_TRIALS:])
    return Place.PROCESS_FOREVER if is_faster else Place.THREAD_FOREVER


class Processes:
    """The processes of a line, started when a step first needs them. May be used from several threads."""

    def __init__(self, count: int, make: Callable[[], StepProcess] = StepProcess) -> None:
        self._count = count
        self._make = make
        self._lock = threading.Lock()
        self._starter: threading.Thread | None = None
        self._all: list[StepProcess] = []
        self._free: queue.SimpleQueue[StepProcess] = queue.SimpleQueue()
        self._is_closed = False
        self.is_ready = False
        """True once at least one process is ready."""

    def start(self) -> None:
        """Begin to start the processes, without waiting. Idempotent."""
        with self._lock:
            if self._starter is None and not self._is_closed:
                self._starter = threading.Thread(target=self._start, name="penstock-step-processes", daemon=True)
                self._starter.start()

    def run(self, step: object, items: Sequence[Inputs]) -> list[Told]:
        """See ``StepProcess.run``. Waits for a free process. Raises OSError if no call ends for a minute."""
        try:
            process = self._free.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise OSError(f"no process was free for {_PATIENCE_S:g} s") from None
        try:
            return process.run(step, items)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes. No call may be running. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._starter is not None:
            self._starter.join()
        for process in self._all:
            process.close()
        self._all.clear()

    def _start(self) -> None:
        try:
            for _ in range(self._count):
                if self._is_closed:
                    return
                self._all.append(self._make())
            for process in self._all:
                process.wait()
                self._free.put(process)
                self.is_ready = True
        except (OSError, EOFError) as error:
            _log.warning("steps stay on threads, because a process could not be started: %s", error)


class Movable:
    """Runs a step where ``next_place`` says. ``here`` runs it on the calling thread."""

    def __init__(self, step: object, here: Callable[[Sequence[Inputs]], list[Told]], processes: Processes) -> None:
        self._step = step
        self._here = here
        self._processes = processes
        self._on_thread: list[float] = []
        self._on_process: list[float] = []
        self.place = Place.THREAD

    def __call__(self, items: Sequence[Inputs]) -> list[Told]:
        if self.place in (Place.THREAD, Place.PROCESS):
            self.place = next_place(self._on_thread, self._on_process, self._processes.is_ready)
            if len(self._on_thread) == _TRIALS and self.place is Place.THREAD:
                self._processes.start()
        start = time.perf_counter()
        if self.place in (Place.PROCESS, Place.PROCESS_FOREVER):
            try:
                outcomes = self._processes.run(self._step, items)
            except (OSError, EOFError, pickle.PicklingError, TypeError, AttributeError) as error:
                _log.warning("a step stays on threads, because it failed on a process: %s", error)
                self.place = Place.THREAD_FOREVER
                return self._here(items)
            self._on_process.append((time.perf_counter() - start) / len(items))
            return outcomes
        outcomes = self._here(items)
        if self.place is Place.THREAD:
            self._on_thread.append((time.perf_counter() - start) / len(items))
        return outcomes
