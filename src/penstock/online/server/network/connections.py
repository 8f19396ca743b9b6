"""The open connections of a server, on all ports and of all protocols: limited, swept and drained together."""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import ClassVar

from penstock.online.server.network.turns import Turns

LAST_REQUEST_S = 0.5
"""Seconds that an idle connection of a draining server stays open for a request that may already be under way."""

_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
_LOOKS = 64
"""Most connections that a new one over the limit looks at for an idle one."""
_SPARE = 64
"""Connections over the limit that may ask for the server's health."""
_LINGERING = 128
"""Most connections that were closed to make room and still exist; their descriptors are beyond the limit."""


class ServerConnection(asyncio.Protocol, ABC):
    """A connection, as the event loop and the server use it."""

    __slots__ = ()

    protocol: ClassVar[str] = ""
    """The protocol; empty until it is known."""

    @abstractmethod
    def check_time(self, now: float) -> None:
        """Abort the connection if a time limit has passed; ``now`` is in seconds."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Tell the client, if the protocol allows it, to connect elsewhere; requests on this connection are still answered."""

    @abstractmethod
    def close_if_idle(self) -> None:
        """Accept no further request, and close after the last answer, or now if there is none."""

    @abstractmethod
    def make_room(self) -> bool:
        """Close if no request is being received or answered, in favour of a new client. Returns False otherwise."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once, without answering requests in flight."""


def has_left(transport: asyncio.Transport) -> bool | None:
    """True if the client has reset the connection, None if it has closed its side; ``transport`` notices only while it reads."""
    try:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connected:
            state = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (OSError, AttributeError):
        return False  # a Unix socket
    return True if state == _TCP_CLOSE else None if state == _TCP_CLOSE_WAIT else False


def end_sending(transport: asyncio.Transport) -> bool:
    """Half-close the connection after the last answer; False if the transport can only close it."""
    if not transport.can_write_eof():
        return False
    try:
        transport.write_eof()
    except OSError:
        # The client has left; asyncio, unlike uvloop, notices only here.
        transport.abort()
    return True


class Connections:
    """All open connections. Each adds itself when it is made and discards itself when it is lost. Belongs to the event loop."""

    spare: Connections | None = None
    """Where connections over the limit go; None if they are refused."""

    def __init__(self, limit: int) -> None:
        self.draining = False
        """True if a connection closes once its requests are answered."""
        self.leaving = False
        """True once the server no longer listens, so clients should send their next request elsewhere."""
        self.turns = Turns()
        self._limit = limit
        self._open: dict[ServerConnection, None] = {}
        self._evicted: set[ServerConnection] = set()
        """Those that were closed to make room, and still exist."""
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ServerConnection) -> bool:
        """Count ``connection``. Over the limit, an old connection without a request is closed in its favour.

        So clients that hold connections idle do not lock out others. Returns False if there is none; the new connection must then
        leave for the ``spare`` ones, or refuse its client and close.
        """
        self._open[connection] = None
        return len(self._open) - len(self._evicted) <= self._limit or self._evict(connection)

    def discard(self, connection: ServerConnection) -> None:
        """Stop counting ``connection``, which is closed."""
        self._open.pop(connection, None)
        self._evicted.discard(connection)
        if not self._open:
            self._empty.set()

    def _evict(self, newest: ServerConnection) -> bool:
        """Close an idle connection. Busy ones move to the end of the row, so that the next call looks at others."""
        if len(self._evicted) >= min(_LINGERING, self._limit):
            return False  # they close slower than others come
        for connection in list(islice(self._open, _LOOKS)):
            if connection is newest:
                continue
            del self._open[connection]
            self._open[connection] = None
            if connection not in self._evicted and connection.make_room():
                # It may be gone already.
                self._evicted.update({connection} & self._open.keys())
                return True
        return False

    def by_protocol(self) -> dict[str, int]:
        """The number of connections by protocol."""
        return dict(Counter(connection.protocol or "unknown" for connection in self._open))

    def check_time(self, now: float) -> None:
        """Abort connections that exceed a time limit."""
        for connection in list(self._open):
            connection.check_time(now)
        if self.spare is not None:
            self.spare.check_time(now)

    def abort(self) -> None:
        """Abort all connections."""
        for connection in list(self._open):
            connection.abort()
        if self.spare is not None:
            self.spare.abort()

    async def drain(self) -> None:
        """Wait until all are closed: each after its last answer, or after a short idle time."""
        self.draining = self.leaving = True
        for connection in list(self._open):
            connection.begin_drain()
        await self._wait_until_empty(LAST_REQUEST_S)
        for connection in list(self._open):
            connection.close_if_idle()
        await self._wait_until_empty(None)
        if self.spare is not None:
            await self.spare.drain()

    async def _wait_until_empty(self, timeout_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()


class SpareConnections(Connections):
    """Connections over the limit of others, which may ask for the server's health only, and close after the answer.

    There are few, and none is refused: the oldest is closed in favour of a new one, whatever it does.
    """

    def __init__(self, limit: int = _SPARE) -> None:
        super().__init__(limit)
        self.draining = True

    def _evict(self, newest: ServerConnection) -> bool:
        oldest = next(connection for connection in self._open if connection not in self._evicted)
        self._evicted.add(oldest)
        oldest.abort()
        self._evicted &= self._open.keys()  # it may be gone already
        return True
