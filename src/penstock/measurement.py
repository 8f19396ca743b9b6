"""The words of measuring: an estimate with its interval, a latency profile, and how quiet the machine was."""

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
    """How quiet the machine was while measuring."""

    load_before: float
    load_after: float
    steal_percent: float
    dirty: bool
    """Whether other work took so much of the machine that the figures deserve little trust."""
