"""Time by stage: functions are wrapped where they are looked up, and each stage gets the time of its own functions without that of
the others which they call. What wrapping itself costs is measured beforehand and taken off."""

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
"""By stage its time and its calls."""


class _Local(threading.local):
    """Of one thread: the time of the calls within each call that runs, and its notes."""

    def __init__(self, everyones: list[_Notes]) -> None:
        self.stack: list[float] = []
        self.notes: _Notes = {}
        everyones.append(self.notes)


class Stopwatch:
    """Time by stage, in nanoseconds, of all threads together; ``clear`` between bursts."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._notes: list[_Notes] = []  # of each thread, so that none waits for another
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
        """Forget what was measured."""
        for notes in self._notes:
            notes.clear()

    @contextmanager
    def watching(self, probes: Sequence[Probe]) -> Iterator[None]:
        """Wrap the functions of ``probes`` while it lasts."""
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in probes]
        for (stage, owner, name), (_, _, function) in zip(probes, originals, strict=True):
            setattr(owner, name, self.timed(stage, function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time counted for ``stage``."""
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
        """What a call costs within its own measured time, and beyond it in its caller's."""

        def nothing() -> None:
            """Cost nothing."""

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
