"""How long a batch takes, learnt from those that ran.

For every power of two a bucket keeps moving averages of rows, duration and deviation, as TCP does for round trips (RFC 6298); between
buckets durations are interpolated. What was measured is forgotten after a while, so that an estimate can never turn away the very
requests that would correct it.
"""

from __future__ import annotations

import msgspec

_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 2.0
"""How many mean deviations above the mean counts as the upper end; of a normal distribution the 95th percentile."""
_OUTLIER = 4.0
"""A measurement counts at most as its bucket's mean and so many deviations, so that one pause does not look like a slow model."""
_LIFE_NS = 1_000_000_000
_LIFE_RUNS = 8.0
"""A bucket is forgotten when it was not measured for a second, or for the time of so many runs if that is longer."""


class _Bucket(msgspec.Struct):
    rows: float
    mean_ns: float
    deviation_ns: float
    measured_ns: int

    def observe(self, rows: int, ns: float, now_ns: int) -> None:
        error = min(ns - self.mean_ns, self.mean_ns + _OUTLIER * self.deviation_ns)
        self.rows += _GAIN * (rows - self.rows)
        self.mean_ns += _GAIN * error
        self.deviation_ns += _DEVIATION_GAIN * (abs(error) - self.deviation_ns)
        self.measured_ns = now_ns

    def is_fresh(self, now_ns: int) -> bool:
        return now_ns - self.measured_ns < max(_LIFE_NS, _LIFE_RUNS * self.mean_ns)


class LatencyModel:
    """One thread writes; others that read see a bucket before a measurement, after it or in its middle, which is all good enough."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def observe(self, rows: int, ns: int, now_ns: int) -> None:
        """A batch of ``rows`` (>= 1) took ``ns``, and ended at ``now_ns``."""
        bucket = self._buckets.get(rows.bit_length())
        if bucket is None or not bucket.is_fresh(now_ns):
            self._buckets[rows.bit_length()] = _Bucket(rows, ns, ns / 4, now_ns)
        else:
            bucket.observe(rows, ns, now_ns)

    def mean(self, rows: int, now_ns: int) -> int:
        """Nanoseconds that a batch of ``rows`` takes on average; 0 if nothing was measured of late."""
        return self._at(rows, now_ns, 0.0)

    def upper(self, rows: int, now_ns: int) -> int:
        """Nanoseconds in which a batch of ``rows`` is very likely done; 0 if nothing was measured of late."""
        return self._at(rows, now_ns, _DEVIATIONS)

    def _at(self, rows: int, now_ns: int, deviations: float) -> int:
        """Interpolated between the nearest buckets; beyond them the least that is to be expected, since what was never seen must be
        let through to be seen: fewer rows take their share of the time, more rows no less time."""
        below_rows = below_ns = 0.0
        for _, bucket in sorted(self._buckets.copy().items()):
            if not bucket.is_fresh(now_ns):
                continue
            ns = bucket.mean_ns + deviations * bucket.deviation_ns
            if rows <= bucket.rows:
                share = (rows - below_rows) / (bucket.rows - below_rows)
                return int(below_ns + share * (ns - below_ns))
            below_rows, below_ns = bucket.rows, ns
        return int(below_ns)
