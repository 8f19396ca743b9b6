"""The latency profile of a model by batch size, and what to conclude from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.bundle.evidence import LatencyPoint
from penstock.engines.base import LoadedModel
from penstock.perf.measure import feed, interleave, repeat_rows
from penstock.tensor import Array

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that are profiled."""

_ENOUGH = 0.95
"""A batch that reaches this share of the best throughput is as good as the best, and kinder to latency."""


def profile(
    models: Mapping[str, LoadedModel],
    samples: Mapping[str, Array],
    budget_s: float,
    batches: Sequence[int] = BATCHES,
    on_batch: Callable[[int], None] = lambda _: None,
) -> dict[str, tuple[LatencyPoint, ...]]:
    """Profile ``models`` against one another, interleaved, at each of ``batches``; ``budget_s`` is shared evenly.

    ``samples`` hold rows along their first axis. A model that is not batchable is profiled with a single row only.
    """
    points: dict[str, list[LatencyPoint]] = {name: [] for name in models}
    for batch in batches:
        able = {name: model for name, model in models.items() if batch == 1 or model.signature.batchable}
        inputs = repeat_rows(samples, batch)
        for name, timings in interleave({n: feed(m, inputs) for n, m in able.items()}, budget_s / len(batches)).items():
            points[name].append(LatencyPoint(batch, timings.p50_ms, timings.p99_ms))
        on_batch(batch)
    return {name: tuple(profiled) for name, profiled in points.items()}


def rows_per_second(point: LatencyPoint) -> float:
    """Throughput of one instance that runs batches of this size back to back."""
    return point.batch / point.p50_ms * 1e3


def knee(points: Sequence[LatencyPoint], p99_ms: float | None = None) -> LatencyPoint:
    """The smallest batch that reaches 95 % of the best throughput among those whose p99 is within ``p99_ms``.

    If no batch is within it, the first point (batch 1).
    """
    allowed = [point for point in points if p99_ms is None or point.p99_ms <= p99_ms] or list(points[:1])
    best = max(rows_per_second(point) for point in allowed)
    return next(point for point in allowed if rows_per_second(point) >= _ENOUGH * best)
