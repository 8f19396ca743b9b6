"""Quantiles over the last minute, as in Triton's summaries.

A duration's leading bit and the five following bits determine its bucket. The relative error of a quantile is therefore at most
1.6 % everywhere. Counts are grouped into slices of ten seconds. Slices older than a minute are dropped. All processes use the
machine's monotonic clock, so their slices can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

WINDOW_NS = 60_000_000_000
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

_SLICE_NS = WINDOW_NS // 6
_BITS = 5


class RecentWindow(msgspec.Struct):
    """Durations of the last minute."""

    slices: dict[int, dict[int, int]] = {}
    """The count of each bucket, by the number of the slice."""

    def add(self, ns: int, count: int, now_ns: int) -> None:
        """Add ``count`` durations of ``ns`` (>= 0) at time ``now_ns``."""
        number = now_ns // _SLICE_NS
        buckets = self.slices.get(number)
        if buckets is None:
            self.slices = {each: kept for each, kept in self.slices.items() if each > number - WINDOW_NS // _SLICE_NS}
            buckets = self.slices[number] = {}
        bucket = _bucket(ns)
        buckets[bucket] = buckets.get(bucket, 0) + count

    def quantiles(self, wanted: Sequence[float], now_ns: int) -> list[float | None]:
        """Quantiles in nanoseconds, by nearest rank; None if the window is empty."""
        oldest = now_ns // _SLICE_NS - WINDOW_NS // _SLICE_NS
        total: dict[int, int] = {}
        for number, buckets in self.slices.items():
            if number > oldest:
                for bucket, count in buckets.items():
                    total[bucket] = total.get(bucket, 0) + count
        number_of_all = sum(total.values())
        return [_at_rank(sorted(total.items()), quantile * number_of_all) for quantile in wanted]


class RecentDurations(msgspec.Struct):
    """Recent durations of each stage of a model's requests."""

    request: RecentWindow = msgspec.field(default_factory=RecentWindow)
    queue: RecentWindow = msgspec.field(default_factory=RecentWindow)
    compute_input: RecentWindow = msgspec.field(default_factory=RecentWindow)
    compute_infer: RecentWindow = msgspec.field(default_factory=RecentWindow)
    compute_output: RecentWindow = msgspec.field(default_factory=RecentWindow)
    cache_hit: RecentWindow = msgspec.field(default_factory=RecentWindow)
    cache_miss: RecentWindow = msgspec.field(default_factory=RecentWindow)

    def executed(
        self, arrived_ns: Sequence[int], taken_ns: int, compute_ns: tuple[int, int, int], done_ns: int
    ) -> None:
        """Add one batch. ``compute_ns`` has the times of preparing inputs, running the model, and splitting outputs."""
        for arrived in arrived_ns:
            self.request.add(done_ns - arrived, 1, done_ns)
            self.queue.add(taken_ns - arrived, 1, done_ns)
        for window, ns in zip((self.compute_input, self.compute_infer, self.compute_output), compute_ns, strict=True):
            window.add(ns, len(arrived_ns), done_ns)


def _bucket(ns: int) -> int:
    """The bucket of ``ns``: the position of the leading bit and the next five bits. Shorter durations have a bucket each."""
    shift = ns.bit_length() - _BITS - 1
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def _middle(bucket: int) -> float:
    """The middle of a bucket, in nanoseconds."""
    shift = (bucket >> _BITS) - 1
    if shift <= 0:
        return float(bucket)
    return float(((bucket - (shift << _BITS)) << shift) + (1 << shift) / 2)


def _at_rank(buckets: Iterable[tuple[int, int]], rank: float) -> float | None:
    seen = 0
    for bucket, count in buckets:
        seen += count
        if seen >= rank:
            return _middle(bucket)
    return None
