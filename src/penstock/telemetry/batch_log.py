"""What was recorded of batches and not yet added up.

Adding a batch to the statistics is some forty small operations. Right after a batch has run, they are slow, for the model has taken
the processor's caches; so a batch is only noted here, and many are added up in one go, or when somebody looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.telemetry.statistics import BatchTimes, Executed, ModelStatistics, Reason

_MAX_BATCHES = 256
_MAX_REQUESTS = 4096
"""What is kept at most: a few hundred kilobytes, or a millisecond's work."""


class BatchLog:
    """Notes batches for ``statistics``, which are exact after ``digest``. Belongs to the event loop."""

    __slots__ = ("_batches", "_requests", "_statistics")

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._batches: list[Executed] = []
        self._requests = 0

    def executed(self, arrived_ns: Sequence[int], rows: int, reason: Reason, times: BatchTimes, done_ns: int) -> None:
        """As ``ModelStatistics.executed``; what is given is not to be changed any more."""
        batches = self._batches
        batches.append((arrived_ns, rows, reason, times, done_ns))
        self._requests += len(arrived_ns)
        if len(batches) >= _MAX_BATCHES or self._requests >= _MAX_REQUESTS:
            self.digest()

    def digest(self) -> None:
        """Add up all that was noted."""
        if self._batches:
            batches, self._batches, self._requests = self._batches, [], 0
            self._statistics.executed_all(batches)
