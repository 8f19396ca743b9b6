"""Bounds the memory of answers that clients leave unread: of one connection, and of all together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.clock import Clock
from penstock.online.server.access.admission import LARGE_BYTES

STALE_S = 1.0
"""A client that has read nothing for this time is disconnected when others need the memory."""
FLOOR_BYTES = 1 << 20
"""A connection may always leave this much unread, or one answer of any size."""


class UnreadTotal:
    """The unread answers of all connections. Belongs to the event loop."""

    def __init__(self, limit: int, clock: Clock, on_fall: Callable[[], None] = lambda: None) -> None:
        """``on_fall``: see ``ByteBudget``."""
        self.limit = limit
        self._on_fall = on_fall
        self._peak = 0
        self.clock = clock
        self.count = 0
        """Bytes, as of each connection's last ``settle``."""
        self.waiting: OrderedDict[Unread, float] = OrderedDict()
        """Connections that have left answers unread, and when each has last read something; that of the first is longest ago."""

    def has_room(self, size: int, keep: Unread) -> bool:
        """Whether there is room for ``size`` bytes, if need be after clients other than ``keep`` that do not read are disconnected."""
        while self.count + size > self.limit:
            stalest = next(iter(self.waiting), None)
            if stalest is None or stalest is keep or self.clock.now() - self.waiting[stalest] < STALE_S:
                return False
            del self.waiting[stalest]
            stalest.evict()
            stalest.settle()
        return True

    def report(self, change: int) -> None:
        """Count ``change`` bytes more."""
        self.count += change
        self._peak = max(self._peak, self.count)
        if self._peak >= LARGE_BYTES and self.count <= self._peak // 4:
            self._peak = self.count
            self._on_fall()


def _gone() -> None:
    pass


class Unread:
    """The unread answers of one connection."""

    __slots__ = ("_total", "count", "evict", "has_read", "reported")

    def __init__(self, total: UnreadTotal, evict: Callable[[], None]) -> None:
        """``evict`` disconnects the client and removes all of its answers."""
        self.count = 0
        """Bytes; up to ``FLOOR_BYTES`` may be added to it without ``add``."""
        self.has_read = False
        """True if the client has read an answer since the last ``settle``."""
        self.evict = evict
        self._total = total
        self.reported = 0
        """The count when ``settle`` was last called; as long as both are 0, it need not be."""

    def add(self, size: int) -> bool:
        """Count an answer of ``size`` bytes. Returns False, and does not count it, if it must be dropped for lack of memory."""
        count = self.count + size
        if count > FLOOR_BYTES and not self._total.has_room(count - self.reported, self) and self.count:
            return False
        self.count = count
        return True

    def remove(self, size: int) -> None:
        """Note that ``size`` bytes have been sent, or dropped."""
        self.count -= size
        self.has_read = True

    def close(self) -> None:
        """The connection is closed, and all answers are dropped."""
        self.settle()
        self.evict = _gone

    def settle(self) -> None:
        """Report the count, once everything that could be sent is sent."""
        count, total = self.count, self._total
        if count or self.reported:
            total.report(count - self.reported)
            self.reported = count
            if not count:
                total.waiting.pop(self, None)
            else:
                if self.has_read or self not in total.waiting:
                    total.waiting[self] = total.clock.now()
                    total.waiting.move_to_end(self)
                total.has_room(0, self)
        self.has_read = False
