"""The latency profile of a model by batch size, and what to conclude from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.bundle.evidence import LatencyPoint
from penstock.engines.base import LoadedModel
from penstock.perf.measure import FEWEST_CALLS, feed, interleave, repeat_rows
from penstock.tensor import Array

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that are profiled."""

HAND_OVER_MS = 0.1
"""About what a server adds to a call of the engine: waking the instance, merging, splitting, waking the event loop."""

_ENOUGH = 0.95
"""A batch that reaches this share of the best throughput is as good as the best, and kinder to latency."""


def profile(
    models: Mapping[str, LoadedModel],
    samples: Mapping[str, Array],
    budget_s: float,
    batches: Sequence[int] = BATCHES,
    on_batch: Callable[[int], None] = lambda _: None,
    precision: float = 0.0,
) -> dict[str, tuple[LatencyPoint, ...]]:
    """Profile ``models`` against one another, interleaved, at each of ``batches``; ``budget_s`` is shared evenly.

    With ``precision`` a batch ends early, see ``interleave``.
    ``samples`` hold rows along their first axis. Models that are not all batchable are profiled at the rows that one call
    takes. A batch so slow that the fewest calls at it would take more than the whole budget is left out, and all beyond.
    """
    if not all(model.signature.batchable for model in models.values()):
        batches = (max(model.signature.smallest_batch for model in models.values()),)
    points: dict[str, list[LatencyPoint]] = {name: [] for name in models}
    row_s = 0.0
    for batch in batches:
        if FEWEST_CALLS * batch * row_s > budget_s:
            break
        inputs = repeat_rows(samples, batch)
        runs = {name: feed(model, inputs) for name, model in models.items()}
        timed = interleave(runs, budget_s / len(batches), precision=precision)
        for name, timings in timed.items():
            points[name].append(LatencyPoint(batch, timings.p50_ms, timings.p99_ms))
        row_s = sum(timings.p50_ms for timings in timed.values()) / 1e3 / batch
        on_batch(batch)
    return {name: tuple(profiled) for name, profiled in points.items()}


def rows_per_second(point: LatencyPoint) -> float:
    """Throughput of one instance that runs batches of this size back to back."""
    return point.batch / point.p50_ms * 1e3


def knee(points: Sequence[LatencyPoint], p99_ms: float | None = None) -> LatencyPoint:
    """The smallest batch that serves 95 % of the best rows per second, among those whose p99 is within ``p99_ms``.

    What a server adds to each call counts: for a model of microseconds larger batches pay although the engine gains
    nothing by them. If no batch is within ``p99_ms``, the first point (batch 1).
    """
    allowed = [point for point in points if p99_ms is None or point.p99_ms <= p99_ms] or list(points[:1])
    served = [point.batch / (point.p50_ms + HAND_OVER_MS) for point in allowed]
    return next(point for point, rate in zip(allowed, served, strict=True) if rate >= _ENOUGH * max(served))
