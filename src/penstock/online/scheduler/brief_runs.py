"""Whether a batch takes so little time that handing it to a thread would take longer, learnt from those that ran.

Then the event loop may run it itself. It must not do so with a model that keeps it from its other clients, so the rule is strict:
batches of the very shapes, of no fewer rows, and a number of them before; every run is measured. One that was not brief, and be it
for a disturbance, sends the next of its size to the instance's thread, and uses up what many brief ones have earned.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

BRIEF_NS = 100_000
"""About what it costs to hand a batch to a thread and back, whose caches are cold, on a busy core."""
LONG_NS = 10_000_000
"""No disturbance lasts so long: all that was earned is lost."""
NEEDED = 16
"""Brief runs before the first on the event loop, and again for each that was not brief."""
MOST = 64
"""Brief runs that count."""


class BriefRuns(msgspec.Struct):
    """What is known of one model's runs. One thread uses it."""

    key: Hashable = None
    """Their shapes without the rows."""
    rows: int = 0
    """The most rows that were brief."""
    earned: int = 0

    def allow(self, key: Hashable, rows: int) -> bool:
        """Whether a batch of ``rows`` may run on the event loop."""
        return self.earned >= NEEDED and rows <= self.rows and key == self.key

    def observe(self, key: Hashable, rows: int, ns: int) -> None:
        """A batch took ``ns``, wherever it ran."""
        if key != self.key:
            self.key, self.rows, self.earned = key, 0, 0
        if ns > BRIEF_NS:
            self.rows = min(self.rows, rows - 1)
            self.earned = max(0, self.earned - NEEDED) if ns < LONG_NS else 0
        else:
            self.rows = max(self.rows, rows)
            self.earned = min(self.earned + 1, MOST)

    def failed(self) -> None:
        """A batch failed, so the time of the next one is unknown."""
        self.earned = 0
