"""Learns how many items a model should take in one call.

Large batches do not make every model faster. For large convolutions, a row may even be slower in a batch, because the intermediate
results do not fit in the cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.stage import Inputs

_FACTOR = 4
_TRIALS = 4
"""Number of batches of each size before a decision. The fastest counts, because other work only makes a call slower."""
_GAIN = 0.97
"""A larger batch must take less than this fraction of the time of a row."""


class BatchSize:
    """Runs a model, and learns the size of its batches, at most ``most``. May be used from several threads.

    The size is 1 at first. Batches of this size and larger ones alternate. If a row is faster in the larger ones, their size is taken,
    and compared with the next larger one. Otherwise the size is decided.
    """

    def __init__(self, run: Callable[[Sequence[Inputs]], list[Told]], most: int) -> None:
        self._run = run
        self._most = most
        self._size, self._larger = 1, min(_FACTOR, most)
        """Two equal sizes are decided."""
        self._lock = threading.Lock()
        self._row_s: dict[int, list[float]] = {}
        """The seconds of a row in batches of the two sizes."""

    def rows(self) -> int:
        """The number of rows that the next batch should have."""
        return self._larger if len(self._times(self._larger)) < len(self._times(self._size)) else self._size

    def __call__(self, items: Sequence[Inputs]) -> list[Told]:
        """The outcomes of ``items``."""
        start = time.perf_counter()
        outcomes = self._run(items)
        if self._size != self._larger:
            self.note(len(items), time.perf_counter() - start)
        return outcomes

    def note(self, rows: int, seconds: float) -> None:
        """Learn that a batch of ``rows`` rows took ``seconds``. Batches of other sizes than the two are ignored."""
        with self._lock:
            if rows not in (self._size, self._larger) or self._size == self._larger:
                return
            self._row_s.setdefault(rows, []).append(seconds / rows)
            whole, larger = self._times(self._size), self._times(self._larger)
            if min(len(whole), len(larger)) < _TRIALS:
                return
            if min(larger) < _GAIN * min(whole):
                self._size, self._larger = self._larger, min(_FACTOR * self._larger, self._most)
            else:
                self._larger = self._size
            self._row_s = {}

    def _times(self, size: int) -> Sequence[float]:
        return self._row_s.get(size, ())
