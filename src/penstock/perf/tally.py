"""Counts the outcomes and latencies of a run's requests."""

from __future__ import annotations

from array import array
from collections import Counter
from time import process_time
from typing import Any

import msgspec
import numpy as np

_MAX_ERROR_BYTES = 1000  # longer bodies of error responses are truncated


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run. Latencies are exact quantiles over the successful requests; NaN if there are none."""

    throughput: float
    """Successful requests in the window, per second."""
    p50_ms: float
    p95_ms: float
    p99_ms: float
    p999_ms: float
    mean_ms: float
    max_ms: float
    requests: int
    """Number of requests started in the window, including failed requests."""
    errors: int
    errors_by_kind: dict[str, int]
    """Errors by kind: ``HTTP <status>``, or e.g. ``connection dropped``, ``no connection``, ``wrong answer``, ``time-out``."""
    first_errors: dict[str, str] = {}
    """The body of the first error response of each kind, if any."""
    duration_s: float
    """Length of the window in seconds."""
    client_cpu: float
    """Fraction of one core that this process used in the window. If it is near 1, the client may be the bottleneck."""


class ClosedLoopResult(LoadResult, frozen=True, kw_only=True):
    concurrency: int


class OpenLoopResult(LoadResult, frozen=True, kw_only=True):
    """Result of an open loop. ``throughput`` is the achieved rate; it is below ``offered_rate`` if the server cannot keep up."""

    rate: float
    """The requested rate, in requests per second."""
    offered_rate: float
    """Requests per second that the Poisson process scheduled. Varies randomly around ``rate``."""
    connections: int
    """Maximum number of open connections."""


class Tally:
    """Latencies and errors of the requests that start after the time given to ``count_from``. Times are ``time.perf_counter`` seconds.

    Throughput counts all responses within the window, including responses to earlier requests.
    """

    def __init__(self) -> None:
        self._begin = float("inf")
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}
        self._answered = 0
        self._opened_at = 0.0
        self._answered_in_window = 0
        self._window_s = 0.0
        self._cpu_s = 0.0

    def count_from(self, begin: float) -> None:
        """Count only requests that start at ``begin`` or later."""
        self._begin = begin

    def answered(self, started: float, now: float) -> None:
        self._answered += 1
        if started >= self._begin:
            self._latencies.append(now - started)

    def failed(self, kind: str, started: float, body: bytes = b"") -> None:
        """Count an error; ``body`` is the body of the response, if any."""
        if started >= self._begin:
            self._errors[kind] += 1
            if body and kind not in self._first_errors:
                self._first_errors[kind] = body[:_MAX_ERROR_BYTES].decode(errors="replace")

    def open_window(self, now: float) -> None:
        self._opened_at = now
        self._answered_in_window = -self._answered
        self._cpu_s = -process_time()

    def close_window(self, now: float) -> None:
        self._window_s = now - self._opened_at
        self._answered_in_window += self._answered
        self._cpu_s += process_time()

    def figures(self) -> dict[str, Any]:
        """The fields of a LoadResult. Call this after ``close_window``."""
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
