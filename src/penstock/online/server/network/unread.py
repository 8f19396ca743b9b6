"""Limits the memory of responses that clients leave unread, per connection and in total."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.clock import Clock
from penstock.online.server.access.admission import LARGE_BYTES

STALE_S = 1.0
"""If other clients need the memory, a client that has read nothing for this number of seconds may be disconnected. The more the
memory exceeds the limit, the shorter this time becomes, down to a quarter."""
_HASTE = 4
FLOOR_BYTES = 1 << 20
"""Number of bytes that a connection may always leave unread. It may also leave one response of any size unread."""


class UnreadTotal:
    """The unread responses of all connections. Used only on the event loop."""

    def __init__(self, limit: int, clock: Clock, on_fall: Callable[[], None] = lambda: None) -> None:
        """For ``on_fall``, see ``ByteBudget``."""
        self.limit = limit
        self._on_fall = on_fall
        self._peak = 0
        self.clock = clock
        self.count = 0
        """Unread bytes of all connections, as of the last ``settle`` of each connection."""
        self.waiting: OrderedDict[Unread, float] = OrderedDict()
        """Connections with unread responses, and the time when each client last read. They are sorted by this time."""

    def has_room(self, size: int, keep: Unread) -> bool:
        """True if there is room for ``size`` bytes. To make room, disconnects clients, except ``keep``, that have stopped reading."""
        while (wanted := self.count + size) > self.limit:
            stalest = next(iter(self.waiting), None)
            now = self.clock.now()
            patience = STALE_S * max(self.limit / wanted, 1 / _HASTE)
            if stalest is None or stalest is keep or now - self.waiting[stalest] < patience:
                return False
            if stalest.has_progressed():
                self.waiting[stalest] = now
                self.waiting.move_to_end(stalest)
                continue
            del self.waiting[stalest]
            stalest.evict()
            stalest.settle()
        return True

    def report(self, change: int) -> None:
        """Add ``change`` bytes, which may be negative."""
        self.count += change
        self._peak = max(self._peak, self.count)
        if self._peak >= LARGE_BYTES and self.count <= self._peak // 4:
            self._peak = self.count
            self._on_fall()


def _gone() -> None:
    pass


def _unknown() -> int:
    return 0


class Unread:
    """The unread responses of one connection."""

    __slots__ = ("_read", "_seen", "_total", "count", "evict", "has_read", "reported")

    def __init__(self, total: UnreadTotal, evict: Callable[[], None], read: Callable[[], int] = _unknown) -> None:
        """``evict`` disconnects the client and drops its responses. ``read`` returns a number that rises while the client reads."""
        self.count = 0
        """Number of unread bytes. Callers may increase this number up to ``FLOOR_BYTES`` without calling ``add``."""
        self.has_read = False
        """True if the client has read a response since the last ``settle``."""
        self.evict = evict
        self._read = read
        self._seen = 0
        self._total = total
        self.reported = 0
        """The value of ``count`` at the last ``settle``. While both values are 0, ``settle`` need not be called."""

    def add(self, size: int) -> bool:
        """Count a response of ``size`` bytes. Returns False, and counts nothing, if there is no memory for the response."""
        count = self.count + size
        if count > FLOOR_BYTES and not self._total.has_room(count - self.reported, self) and self.count:
            return False
        self.count = count
        return True

    def remove(self, size: int) -> None:
        """Record that ``size`` unread bytes have been sent or dropped."""
        self.count -= size
        self.has_read = True

    def close(self) -> None:
        """Called when the connection is closed and all responses are dropped."""
        self.settle()
        self.evict, self._read = _gone, _unknown

    def has_progressed(self) -> bool:
        """True if the client has read since the last call of this method."""
        before, self._seen = self._seen, self._read()
        return self._seen != before

    def settle(self) -> None:
        """Report the number of unread bytes to ``UnreadTotal``. Call this once all data that could be sent is sent."""
        count, total = self.count, self._total
        if count or self.reported:
            total.report(count - self.reported)
            self.reported = count
            if not count:
                total.waiting.pop(self, None)
            else:
                if self.has_progressed() or self.has_read or self not in total.waiting:
                    total.waiting[self] = total.clock.now()
                    total.waiting.move_to_end(self)
                total.has_room(0, self)
        self.has_read = False
