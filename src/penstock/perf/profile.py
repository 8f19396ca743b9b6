"""Latency profiles of models by batch size, and the choice of a batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.engines.base import LoadedModel
from penstock.measurement import LatencyPoint
from penstock.perf.measure import FEWEST_CALLS, feed, interleave
from penstock.tensor import Array

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Default batch sizes."""

HAND_OVER_MS = 0.1
"""Milliseconds that a server typically adds to one call: waking the instance, merging, splitting, waking the event loop."""

_ENOUGH_CALLS = 300
_ENOUGH = 0.95
"""The smallest batch that reaches this fraction of the best throughput is chosen, because smaller batches have a lower latency."""


def profile(
    models: Mapping[str, LoadedModel],
    inputs_of: Callable[[int], Mapping[str, Array]],
    budget_s: float,
    batches: Sequence[int] = BATCHES,
    on_batch: Callable[[int], None] = lambda _: None,
) -> dict[str, tuple[LatencyPoint, ...]]:
    """Profile all ``models``, interleaved, at each batch size of ``batches``. Each batch size gets the same part of ``budget_s``, but
    takes no longer than its p99 needs. ``inputs_of`` makes the inputs of a batch. If a model is not batchable, only the fixed batch
    size is profiled. Batch sizes whose minimum number of calls exceeds the whole budget are skipped.
    """
    if not all(model.signature.batchable for model in models.values()):
        batches = (max(model.signature.smallest_batch for model in models.values()),)
    points: dict[str, list[LatencyPoint]] = {name: [] for name in models}
    row_s = 0.0
    for batch in batches:
        if FEWEST_CALLS * batch * row_s > budget_s:
            break
        inputs = inputs_of(batch)
        runs = {name: feed(model, inputs) for name, model in models.items()}
        timed = interleave(runs, budget_s / len(batches), enough=_ENOUGH_CALLS)
        for name, timings in timed.items():
            points[name].append(LatencyPoint(batch, timings.p50_ms, timings.p99_ms))
        row_s = sum(timings.p50_ms for timings in timed.values()) / 1e3 / batch
        on_batch(batch)
    return {name: tuple(profiled) for name, profiled in points.items()}


def rows_per_second(point: LatencyPoint) -> float:
    """Throughput of one instance that runs batches of this size continuously."""
    return point.batch / point.p50_ms * 1e3


def knee(points: Sequence[LatencyPoint], p99_ms: float | None = None) -> LatencyPoint:
    """The smallest batch size with at least 95 % of the highest throughput, among batch sizes with a p99 of at most ``p99_ms``.

    The throughput includes the server's overhead per call, which favours larger batches of very fast models. If no batch size meets
    ``p99_ms``, returns the first point.
    """
    allowed = [point for point in points if p99_ms is None or point.p99_ms <= p99_ms] or list(points[:1])
    served = [point.batch / (point.p50_ms + HAND_OVER_MS) for point in allowed]
    return next(point for point, rate in zip(allowed, served, strict=True) if rate >= _ENOUGH * max(served))
