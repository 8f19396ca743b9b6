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


class Stopwatch:
    """Totals by stage, in nanoseconds, from all threads; ``clear`` between bursts."""

    def __init__(self) -> None:
        self.total_ns: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._local = threading.local()
        self._inside_ns = self._outside_ns = 0.0
        self._calibrate()

    def clear(self) -> None:
        """Forget what was measured."""
        self.total_ns.clear()
        self.calls.clear()

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
        now = time.perf_counter_ns
        local = self._local

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            try:
                stack: list[float] = local.stack
            except AttributeError:
                stack = local.stack = []
            stack.append(0.0)
            start = now()
            try:
                return function(*args, **named)
            finally:
                elapsed = now() - start
                inner = stack.pop()
                self.total_ns[stage] = self.total_ns.get(stage, 0.0) + elapsed - inner - self._inside_ns
                self.calls[stage] = self.calls.get(stage, 0) + 1
                if stack:
                    stack[-1] += elapsed + self._outside_ns

        return run

    def _calibrate(self) -> None:
        """What a call costs within its own measured time, and beyond it in its caller's."""

        def nothing() -> None:
            """Cost nothing."""

        wrapped = self.timed("", nothing)
        for _ in range(2):  # once to warm up
            self.clear()
            start = time.perf_counter_ns()
            for _ in range(_CALIBRATION):
                nothing()
            bare_ns = (time.perf_counter_ns() - start) / _CALIBRATION
            start = time.perf_counter_ns()
            for _ in range(_CALIBRATION):
                wrapped()
            whole_ns = (time.perf_counter_ns() - start) / _CALIBRATION
            inside_ns = self.total_ns[""] / _CALIBRATION
        self._inside_ns = max(0.0, inside_ns - bare_ns)
        self._outside_ns = max(0.0, whole_ns - inside_ns)
        self.clear()
