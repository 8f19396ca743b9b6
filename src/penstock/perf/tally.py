"""Counts outcomes and latencies of a run's requests, and computes its figures."""

from __future__ import annotations

from array import array
from collections import Counter
from time import process_time
from typing import Any

import msgspec
import numpy as np

_MOST_SAID = 1000  # bytes of an error's body


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run. Latencies are exact order statistics of the requests answered 200, in ms; NaN without any."""

    throughput: float
    """Requests answered 200 in the window, per second."""
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    mean_ms: float
    max_ms: float
    requests: int
    """Requests begun in the window, answered or failed."""
    errors: int
    errors_by_kind: dict[str, int]
    """``HTTP <status>``, ``connection dropped``, ``no connection``, ``unreadable answer``, ``wrong answer``, ``time-out``."""
    first_errors: dict[str, str] = {}
    """By kind, the body of the first error answer, if it had one."""
    duration_s: float
    """Length of the window."""
    client_cpu: float
    """Share of one core that this process used in the window. Near 1, the client may be the bottleneck."""


class ClosedLoopResult(LoadResult, frozen=True, kw_only=True):
    concurrency: int


class OpenLoopResult(LoadResult, frozen=True, kw_only=True):
    """``throughput`` is the achieved rate; it is below ``offered_rate`` if the server cannot keep up."""

    rate: float
    """Requested rate, per second."""
    offered_rate: float
    """Requests per second that were due; differs from ``rate`` by the randomness of the Poisson process."""
    connections: int
    """Largest number of open connections."""


class Tally:
    """Latencies and errors of the requests begun at or after ``begin``; times are ``time.perf_counter`` seconds.

    Throughput counts all answers within the window, whenever their requests began.
    """

    def __init__(self) -> None:
        self.begin = float("inf")
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._answered = 0
        self._opened_at = 0.0
        self._answered_in_window = 0
        self._window_s = 0.0
        self._cpu_s = 0.0

    def answered(self, started: float, now: float) -> None:
        self._answered += 1
        if started >= self.begin:
            self._latencies.append(now - started)

    def failed(self, kind: str, started: float, said: bytes = b"") -> None:
        """``said`` is the body of the answer, if any."""
        if started >= self.begin:
            self._errors[kind] += 1
            if said and kind not in self._first_errors:
                self._first_errors[kind] = said[:_MOST_SAID].decode(errors="replace")

    def open_window(self, now: float) -> None:
        self._opened_at = now
        self._answered_in_window = -self._answered
        self._cpu_s = -process_time()

    def close_window(self, now: float) -> None:
        self._window_s = now - self._opened_at
        self._answered_in_window += self._answered
        self._cpu_s += process_time()

    def figures(self) -> dict[str, Any]:
        """The fields of a LoadResult. Call after ``close_window``."""
        samples = np.frombuffer(self._latencies, np.float64) * 1e3 if self._latencies else np.array([np.nan])
        p50, p95, p99, p999 = np.quantile(samples, (0.5, 0.95, 0.99, 0.999), method="inverted_cdf").tolist()
        errors = self._errors.total()
        return {
            "throughput": self._answered_in_window / self._window_s,
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "p999_ms": p999,
            "mean_ms": float(samples.mean()),
            "max_ms": float(samples.max()),
            "requests": len(self._latencies) + errors,
            "errors": errors,
            "errors_by_kind": dict(self._errors.most_common()),
            "first_errors": self._first_errors,
            "duration_s": self._window_s,
            "client_cpu": self._cpu_s / self._window_s,
        }
