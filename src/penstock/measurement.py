"""Types for measurements: an estimate with its interval, a latency profile, and the load of the machine."""

from __future__ import annotations

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


class LatencyPoint(msgspec.Struct, frozen=True):
    """Latency of one forward call at one batch size, in milliseconds."""

    batch: int
    p50_ms: float
    p99_ms: float


class Conditions(msgspec.Struct, frozen=True):
    """The load of the machine during a measurement."""

    load_before: float
    load_after: float
    steal_percent: float
    dirty: bool
    """True if the measurements are unreliable because of other work on the machine."""
