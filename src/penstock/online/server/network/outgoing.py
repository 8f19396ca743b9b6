"""Writes the responses of one connection to its transport.

Large responses are written in slices, in turns with other connections. A socket accepts megabytes at once. Copying megabytes for
many clients in one iteration would block the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from penstock.online.server.network.connections import unacknowledged
from penstock.online.server.network.turns import BYTES_A_UNIT, Turns
from penstock.tensor import Buffer

SMALL_BYTES = 64 << 10
"""Maximum bytes of a response that is written at once."""
_FIRST_UNITS = 64
"""Maximum units for the first slice of a response."""
_LEAST_UNITS = 16
"""Units that must be left in the iteration for the first slice to be written immediately."""


def _ignore() -> None:
    pass


class Outgoing:
    """Queues the parts of responses without copying them, and writes them in order. Used only on the event loop."""

    __slots__ = (
        "_handed",
        "_is_paused",
        "_is_queued",
        "_kept",
        "_offset",
        "_on_end",
        "_parts",
        "_pinned",
        "_transport",
        "_turns",
        "is_busy",
    )

    def __init__(self, turns: Turns, on_end: Callable[[], None]) -> None:
        """``on_end`` is called once everything is written and the transport accepts more data. ``write`` itself never calls it."""
        self._turns = turns
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._parts: deque[Buffer] = deque()
        self._offset = 0  # bytes of the first part that are already written
        self._kept = 0  # bytes of the queued parts, including those that are already written
        self._pinned = 0  # bytes of written parts that the transport may still refer to
        self._handed = 0
        self._is_paused = False
        self._is_queued = False
        self.is_busy = False
        """True while a large response is not completely written."""

    def open(self, transport: asyncio.Transport) -> None:
        """Write to ``transport`` from now on."""
        self._transport = transport

    def close(self) -> None:
        """Drop the queue, because the connection is lost. Idempotent."""
        self._transport = None
        self._on_end = _ignore
        self._clear()

    @property
    def unsent(self) -> int:
        """Number of bytes that the operating system has not accepted yet."""
        return 0 if self._transport is None else self._kept - self._offset + self._transport.get_write_buffer_size()

    @property
    def kept(self) -> int:
        """Bytes in memory. A part counts in full until the operating system has accepted its last byte."""
        if self._transport is None:
            return 0
        return self._kept + max(self._pinned, self._transport.get_write_buffer_size())

    def read(self) -> int:
        """Number of bytes that have arrived at the client. It increases while the client reads."""
        transport = self._transport
        return 0 if transport is None else self._handed - transport.get_write_buffer_size() - unacknowledged(transport)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write ``parts`` after all waiting parts."""
        transport = self._transport
        if transport is None:
            return
        size = sum(map(len, parts))
        if size <= SMALL_BYTES and not self.is_busy:
            self._handed += size
            transport.write(b"".join(parts))
            return
        self._parts.extend(part for part in parts if len(part))
        self._kept += size
        if not self.is_busy:
            self.is_busy = True
            # From now on, the transport pauses until its buffer is empty. It then no longer refers to any part.
            transport.set_write_buffer_limits(1, 0)
        units = min(_FIRST_UNITS, self._turns.left)
        if units >= _LEAST_UNITS and not (self._is_paused or self._is_queued):
            self._turns.spend(self._write(units))
        self._continue()

    def pause(self) -> None:
        """Called when the transport accepts no more data."""
        self._is_paused = True

    def resume(self) -> None:
        """Called when the transport accepts data again."""
        self._is_paused = False
        self._continue()
        if not self.is_busy:
            self._on_end()

    def work(self, units: int) -> int:
        """See ``TurnTaker``."""
        self._is_queued = False
        if self._is_paused or not self._parts:
            return 0
        used = self._write(units)
        self._continue()
        if not self.is_busy:
            self._on_end()
        return used

    def _continue(self) -> None:
        """Queue for the next turn, or end the large response."""
        if self._is_paused or not self.is_busy:
            return
        if not self._parts:
            self._clear()
            if self._transport is not None:
                self._transport.set_write_buffer_limits()
        elif not self._is_queued:
            self._is_queued = True
            self._turns.add(self)

    def _clear(self) -> None:
        self._parts.clear()
        self._offset = self._kept = self._pinned = 0
        self.is_busy = False

    def _write(self, units: int) -> int:
        """Write the next slice, of at most ``units`` units. Returns the units used."""
        transport, parts = self._transport, self._parts
        assert transport is not None
        if transport.is_closing():
            self._clear()
            return 1
        size = left = units * BYTES_A_UNIT
        taken: list[Buffer] = []
        while parts and left:
            part, start = parts[0], self._offset
            stop = min(len(part), start + left)
            taken.append(part if stop - start == len(part) else memoryview(part)[start:stop])
            left -= stop - start
            self._offset = stop
            if stop == len(part):
                del parts[0]
                self._offset = 0
                self._kept -= stop
                self._pinned += stop
        size -= left
        self._handed += size
        if len(taken) == 1:
            transport.write(taken[0])
        else:
            transport.writelines(taken)
        return 1 + size // BYTES_A_UNIT
