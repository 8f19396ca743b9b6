"""Bounds the memory of answers that clients leave unread: of one connection, and of all together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.clock import Clock

STALE_S = 1.0
"""A client that has read nothing for this time is disconnected when others need the memory."""
FLOOR_BYTES = 1 << 20
"""A connection may always leave this much unread."""


class UnreadTotal:
    """The unread answers of all connections. Belongs to the event loop."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.clock = clock
        self.count = 0
        """Bytes, as of each connection's last ``settle``."""
        self.waiting: OrderedDict[Unread, float] = OrderedDict()
        """Connections that have left answers unread, and when each has last read something; that of the first is longest ago."""

    def make_room(self, size: int, keep: Unread) -> bool:
        """Disconnect clients other than ``keep`` that do not read, until there is room for ``size`` bytes; False if there is none."""
        while self.count + size > self.limit:
            stalest = next(iter(self.waiting), None)
            if stalest is None or stalest is keep or self.clock.now() - self.waiting[stalest] < STALE_S:
                return False
            del self.waiting[stalest]
            stalest.evict()
            stalest.settle()
        return True


class Unread:
    """The unread answers of one connection."""

    __slots__ = ("_has_read", "_limit", "_settled", "_total", "count", "evict")

    def __init__(self, total: UnreadTotal, limit: int, evict: Callable[[], None]) -> None:
        """From ``limit`` bytes on, ``is_full``. ``evict`` disconnects the client and removes all of its answers."""
        self.count = 0
        """Bytes."""
        self.evict = evict
        self._total = total
        self._limit = limit
        self._settled = 0
        self._has_read = False

    @property
    def is_full(self) -> bool:
        """True if no further request should be started until the client has read."""
        return self.count >= self._limit

    def add(self, size: int) -> bool:
        """Count an answer of ``size`` bytes. Returns False, and does not count it, if it must be dropped for lack of memory."""
        total, more = self._total, self.count - self._settled + size
        is_over = total.count + more > total.limit and not total.make_room(more, self)
        if is_over and self.count and self.count + size > FLOOR_BYTES:
            return False
        self.count += size
        return True

    def remove(self, size: int) -> None:
        """Note that ``size`` bytes have been sent, or dropped."""
        self.count -= size
        self._has_read = True

    def settle(self) -> None:
        """Report the count, once everything that could be sent is sent."""
        count, waiting = self.count, self._total.waiting
        if count or self._settled:
            self._total.count += count - self._settled
            self._settled = count
            if not count:
                waiting.pop(self, None)
            elif self._has_read or self not in waiting:
                waiting[self] = self._total.clock.now()
                waiting.move_to_end(self)
        self._has_read = False
