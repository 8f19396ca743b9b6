"""Recorded batches that are not yet part of the statistics.

Adding a batch to the statistics takes about forty small operations. Directly after a batch these operations are slow, because the
model's data has replaced the statistics in the processor's caches. The log therefore only records each batch, and later adds many
batches together, at the latest when statistics are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.telemetry.statistics import BatchTimes, Executed, ModelStatistics, Reason

_MAX_BATCHES = 256
_MAX_REQUESTS = 4096
"""Limits on the log. They keep the log below a few hundred kilobytes, and a ``digest`` below about a millisecond."""


class BatchLog:
    """Records batches for ``statistics``, which are up to date after ``digest``. Used only on the event loop."""

    __slots__ = ("_batches", "_requests", "_statistics")

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._batches: list[Executed] = []
        self._requests = 0

    def executed(self, arrived_ns: Sequence[int], rows: int, reason: Reason, times: BatchTimes, done_ns: int) -> None:
        """Record one batch for ``ModelStatistics.executed``. The caller must not change the arguments afterwards."""
        batches = self._batches
        batches.append((arrived_ns, rows, reason, times, done_ns))
        self._requests += len(arrived_ns)
        if len(batches) >= _MAX_BATCHES or self._requests >= _MAX_REQUESTS:
            self.digest()

    def digest(self) -> None:
        """Add all recorded batches to the statistics."""
        if self._batches:
            batches, self._batches, self._requests = self._batches, [], 0
            self._statistics.executed_all(batches)
