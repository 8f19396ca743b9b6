"""Predicts the duration of a batch from earlier batches.

There is one bucket of batch sizes for each power of two. Each bucket has exponential moving averages of rows, duration and
deviation, computed as TCP does for round-trip times (RFC 6298). The model interpolates between buckets. Measurements expire.
Otherwise, an outdated estimate could reject all requests, and no new measurement would correct the estimate.
"""

from __future__ import annotations

import msgspec

_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 2.0
"""The upper bound is the mean plus this many mean deviations. For a normal distribution, it is the 95th percentile."""
_OUTLIER = 4.0
"""Measurements are limited to twice the mean plus this many deviations, so that one pause does not make the model appear slow."""
_LIFE_NS = 1_000_000_000
_LIFE_RUNS = 8.0
"""A bucket expires after a second without measurements, or after the duration of this number of runs if that is longer."""


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
    """Durations by batch size. Only one thread may write. Other threads may read at any time; the value need not be exact."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}

    def observe(self, rows: int, ns: int, now_ns: int) -> None:
        """Learn from a batch of ``rows`` (>= 1) that took ``ns`` and ended at ``now_ns``."""
        bucket = self._buckets.get(rows.bit_length())
        if bucket is None or not bucket.is_fresh(now_ns):
            self._buckets[rows.bit_length()] = _Bucket(rows, ns, ns / 4, now_ns)
        else:
            bucket.observe(rows, ns, now_ns)

    def mean(self, rows: int, now_ns: int) -> int:
        """Mean nanoseconds of a batch of ``rows``; 0 without recent measurements."""
        return self._at(rows, now_ns, 0.0)

    def upper(self, rows: int, now_ns: int) -> int:
        """Upper bound of the nanoseconds of a batch of ``rows``; 0 without recent measurements."""
        return self._at(rows, now_ns, _DEVIATIONS)

    def _at(self, rows: int, now_ns: int, deviations: float) -> int:
        """Interpolate between the nearest buckets.

        For sizes outside the measured range, return the lowest plausible duration, because a size that never runs is never
        measured. Below the range, this duration is proportional to the rows. Above the range, it is constant.
        """
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
