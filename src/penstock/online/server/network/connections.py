"""The open connections of a server, on all ports and of all protocols, with common limits, time checks and draining."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import ClassVar

from penstock.online.server.network.turns import Turns

LAST_REQUEST_S = 0.5
"""Seconds for which an idle connection stays open while the server drains, because a request may already be on its way."""

_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8
_LOOKS = 64
"""Maximum number of strangers, and of other connections, to examine when a new connection exceeds the limit."""
_SPARE = 64
"""Number of spare connections: connections over the limit that may only query the server's health."""
_LINGERING = 128
"""Maximum number of connections that were closed to make room but still exist. Such connections do not count towards the limit."""


class ServerConnection(asyncio.Protocol, ABC):
    """A connection. The event loop and the server call its methods."""

    __slots__ = ()

    protocol: ClassVar[str] = ""
    """Name of the connection's protocol; empty until the protocol is known."""

    @abstractmethod
    def check_time(self, now: float) -> None:
        """Abort the connection if a time limit has passed. ``now`` is in seconds."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Ask the client to connect elsewhere, if the protocol allows it. Requests on this connection are still answered."""

    @abstractmethod
    def close_if_idle(self) -> None:
        """Accept no further requests. Close after the last response, or immediately if no request is in flight."""

    @property
    @abstractmethod
    def requests(self) -> int:
        """The number of complete requests that the client has sent."""

    @abstractmethod
    def make_room(self) -> bool:
        """Close the connection to make room for a new client. Returns False if a request is being answered, or if the client is
        sending a request that is not its first.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close immediately, without answering requests in flight."""


def has_left(transport: asyncio.Transport) -> bool | None:
    """True if the client has reset the connection, None if the client has half-closed it. A paused ``transport`` reports neither."""
    try:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connected:
            state = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (OSError, AttributeError):
        return False  # a Unix socket
    return True if state == _TCP_CLOSE else None if state == _TCP_CLOSE_WAIT else False


def end_sending(transport: asyncio.Transport) -> bool:
    """Half-close the connection after the last response. Returns False if the transport does not support this."""
    if not transport.can_write_eof():
        return False
    try:
        transport.write_eof()
    except OSError:
        # The client has disconnected. Unlike uvloop, asyncio notices only here.
        transport.abort()
    return True


def unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the operating system has accepted from ``transport`` but that have not arrived at the client; 0 if unknown."""
    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError, ValueError):  # ValueError: the transport is closed, so its descriptor is -1
        return 0
    return int.from_bytes(count, sys.byteorder)


class Connections:
    """All open connections. A connection calls ``add`` when it opens, and ``discard`` when it closes. Used only on the event loop."""

    spare: Connections | None = None
    """Takes connections over the limit; None if such connections are refused."""

    def __init__(self, limit: int) -> None:
        self.draining = False
        """True if connections close once their requests are answered."""
        self.leaving = False
        """True once the server no longer listens, so that clients should connect elsewhere."""
        self.turns = Turns()
        self._limit = limit
        self._strangers: dict[ServerConnection, None] = {}
        """Strangers: connections whose clients had sent no complete request when they were last examined."""
        self._known: dict[ServerConnection, int] = {}
        """Connections that are not strangers. Each has the number of its requests when it was last examined."""
        self._evicted: set[ServerConnection] = set()
        """Connections that were closed to make room, but still exist."""
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    @property
    def _open(self) -> list[ServerConnection]:
        return [*self._known, *self._strangers]

    def add(self, connection: ServerConnection) -> bool:
        """Count ``connection``. If there are then too many connections, close another one, so that clients without requests cannot
        lock out other clients.

        Returns False if no connection can be closed. The new connection must then move to ``spare``, or refuse its client.
        """
        self._strangers[connection] = None
        return len(self) - len(self._evicted) <= self._limit or self._evict(connection)

    def discard(self, connection: ServerConnection) -> None:
        """Stop counting ``connection``, which is closed."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)
        self._evicted.discard(connection)
        if not len(self):
            self._empty.set()

    def _evict(self, newest: ServerConnection) -> bool:
        """Close the oldest stranger. If there are no strangers, close an idle connection that was not used since it was last examined.

        Examined connections move to the end of their queue, so that the next call examines other connections.
        """
        if len(self._evicted) >= min(_LINGERING, self._limit):
            return False  # the closed connections end more slowly than new ones arrive
        for connection in list(islice(self._strangers, _LOOKS)):
            if connection is newest:
                continue
            del self._strangers[connection]
            if connection.requests:
                self._known[connection] = connection.requests
                continue
            self._strangers[connection] = None
            if self._closes(connection):
                return True
        for connection, requests in list(islice(self._known.items(), _LOOKS)):
            del self._known[connection]
            self._known[connection] = connection.requests
            if connection.requests == requests and self._closes(connection):
                return True
        return False

    def _closes(self, connection: ServerConnection) -> bool:
        """Close ``connection`` if its ``make_room`` allows this."""
        if connection in self._evicted or not connection.make_room():
            return False
        if connection in self._strangers or connection in self._known:  # the connection may already be gone
            self._evicted.add(connection)
        return True

    def by_protocol(self) -> dict[str, int]:
        """The number of connections by protocol."""
        return dict(Counter(connection.protocol or "unknown" for connection in self._open))

    def check_time(self, now: float) -> None:
        """Abort connections that exceed a time limit."""
        for connection in self._open:
            connection.check_time(now)
        if self.spare is not None:
            self.spare.check_time(now)

    def abort(self) -> None:
        """Abort all connections."""
        for connection in self._open:
            connection.abort()
        if self.spare is not None:
            self.spare.abort()

    async def drain(self) -> None:
        """Wait until all connections are closed. A connection closes after its last response, or after a short idle time."""
        self.draining = self.leaving = True
        for connection in self._open:
            connection.begin_drain()
        await self._wait_until_empty(LAST_REQUEST_S)
        for connection in self._open:
            connection.close_if_idle()
        await self._wait_until_empty(None)
        if self.spare is not None:
            await self.spare.drain()

    async def _wait_until_empty(self, timeout_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self):
                    self._empty.clear()
                    await self._empty.wait()


class SpareConnections(Connections):
    """Connections over the connection limit. They can only query health and metrics, and close after the response.

    The number of spare connections is limited. If there are too many, the oldest is closed, even if it is busy.
    """

    def __init__(self, limit: int = _SPARE) -> None:
        super().__init__(limit)
        self.draining = True

    def _evict(self, newest: ServerConnection) -> bool:
        oldest = next(connection for connection in self._open if connection not in self._evicted)
        self._evicted.add(oldest)
        oldest.abort()
        self._evicted.intersection_update(self._open)  # the connection may already be gone
        return True
