"""Decides which batches the event loop runs itself, because they take less time than a thread switch.

A long run would block the server's other clients, so the rule is strict: the event loop runs a batch only if many earlier batches
with the same shapes and at least the same number of rows were short. Every short run earns credit, and every long run loses credit.
After a long run, batches of this size go to the instance's thread again until many short runs have regained the credit.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

BRIEF_NS = 100_000
"""Approximate cost of passing a batch to a thread and back on a busy core, with cold caches."""
LONG_NS = 10_000_000
"""A run of at least this many nanoseconds loses all credit, because a disturbance cannot explain such a long run."""
NEEDED = 16
"""Number of short runs that are required before the event loop runs a batch, at first and again after a long run."""
MOST = 64
"""Maximum credit."""


class BriefRuns(msgspec.Struct):
    """The credit of one model. Only one thread uses it."""

    key: Hashable = None
    """The shapes of the batches, without the number of rows."""
    rows: int = 0
    """The maximum rows of a short run."""
    earned: int = 0

    def allow(self, key: Hashable, rows: int) -> bool:
        """Return True if the event loop may run a batch of ``rows``."""
        return self.earned >= NEEDED and rows <= self.rows and key == self.key

    def observe(self, key: Hashable, rows: int, ns: int) -> None:
        """Learn from a batch that took ``ns`` nanoseconds on any thread."""
        if key != self.key:
            self.key, self.rows, self.earned = key, 0, 0
        if ns > BRIEF_NS:
            self.rows = min(self.rows, rows - 1)
            self.earned = max(0, self.earned - NEEDED) if ns < LONG_NS else 0
        else:
            self.rows = max(self.rows, rows)
            self.earned = min(self.earned + 1, MOST)

    def failed(self) -> None:
        """Drop all credit: after a failure, the time of the next batch is unknown."""
        self.earned = 0
