"""Measures time by stage. Functions are wrapped where they are looked up. The time of a stage excludes the functions of other
stages that its functions call. The cost of wrapping is measured beforehand and subtracted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_CALIBRATION = 20_000

Probe = tuple[str, Any, str]
"""``(stage, owner, name)``: the function ``owner.name`` belongs to ``stage``."""


_Notes = dict[str, list[float]]
"""The time and the number of calls of each stage."""


class _Local(threading.local):
    """The data of one thread: the time of nested calls within each running call, and the thread's measurements."""

    def __init__(self, everyones: list[_Notes]) -> None:
        self.stack: list[float] = []
        self.notes: _Notes = {}
        everyones.append(self.notes)


class Stopwatch:
    """Measures the time by stage, in nanoseconds, summed over all threads. Call ``clear`` between bursts."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._notes: list[_Notes] = []  # one per thread, so that no thread waits for another
        self._local = _Local(self._notes)
        self._inside_ns = self._outside_ns = 0.0
        self._calibrate()

    @property
    def total_ns(self) -> dict[str, float]:
        """Time by stage."""
        return self._sum(0)

    @property
    def calls(self) -> dict[str, int]:
        """Calls by stage."""
        return {stage: int(calls) for stage, calls in self._sum(1).items()}

    def clear(self) -> None:
        """Drop all measurements."""
        for notes in self._notes:
            notes.clear()

    @contextmanager
    def watching(self, probes: Sequence[Probe]) -> Iterator[None]:
        """Wrap the functions of ``probes`` until the body ends."""
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in probes]
        for (stage, owner, name), (_, _, function) in zip(probes, originals, strict=True):
            setattr(owner, name, self.timed(stage, function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` wrapped so that its time counts for ``stage``."""
        now = self._now_ns
        local = self._local

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            stack = local.stack
            stack.append(0.0)
            start = now()
            try:
                return function(*args, **named)
            finally:
                elapsed = now() - start
                inner = stack.pop()
                note = local.notes.setdefault(stage, [0.0, 0.0])
                note[0] += elapsed - inner - self._inside_ns
                note[1] += 1
                if stack:
                    stack[-1] += elapsed + self._outside_ns

        return run

    def _sum(self, figure: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for notes in list(self._notes):
            for stage, note in list(notes.items()):
                found[stage] = found.get(stage, 0.0) + note[figure]
        return found

    def _calibrate(self) -> None:
        """Measure the cost of wrapping: the part within a call's own measured time, and the part within its caller's time."""

        def nothing() -> None:
            """Do nothing."""

        wrapped = self.timed("", nothing)
        for _ in range(2):  # once to warm up
            self.clear()
            start = self._now_ns()
            for _ in range(_CALIBRATION):
                nothing()
            bare_ns = (self._now_ns() - start) / _CALIBRATION
            start = self._now_ns()
            for _ in range(_CALIBRATION):
                wrapped()
            whole_ns = (self._now_ns() - start) / _CALIBRATION
            inside_ns = self.total_ns[""] / _CALIBRATION
        self._inside_ns = max(0.0, inside_ns - bare_ns)
        self._outside_ns = max(0.0, whole_ns - inside_ns)
        self.clear()
