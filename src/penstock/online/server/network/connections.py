"""The open connections of a server, on whatever port and of whatever protocol: bounded, swept and drained together."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from typing import ClassVar

LAST_REQUEST_S = 0.5
"""How long a connection of a draining server stays open for what its client may already have sent."""


class ServerConnection(asyncio.Protocol, ABC):
    """A connection as the event loop and the server that holds it see it."""

    __slots__ = ()

    protocol: ClassVar[str] = ""
    """What is spoken; empty while nobody knows."""

    @abstractmethod
    def check_time(self, now: float) -> None:
        """Cut the client off if nothing has come forward for longer than it may; ``now`` in seconds."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Tell the client, if the protocol can, to ask elsewhere from now on; what it asks here is still answered."""

    @abstractmethod
    def close_if_idle(self) -> None:
        """Take nothing new, and close, now or after the last answer."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once, whatever is in flight."""


def end_sending(transport: asyncio.Transport) -> bool:
    """Tell the client that nothing more will come; False if there is no way to tell it but to close."""
    if not transport.can_write_eof():
        return False
    try:
        transport.write_eof()
    except OSError:
        # The client is gone, which asyncio, unlike uvloop, finds out here.
        transport.abort()
    return True


class Connections:
    """Belongs to the event loop. Each connection adds itself when it is made, and discards itself when it is lost."""

    def __init__(self, limit: int) -> None:
        self.draining = False
        """Whether connections are to be closed as soon as what was asked on them has been answered."""
        self.leaving = False
        """Whether nobody listens any more: clients had better go elsewhere with what they ask next."""
        self._limit = limit
        self._open: set[ServerConnection] = set()
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: ServerConnection) -> bool:
        """Count ``connection``; whether there may be that many. If not, it has to refuse its client and close."""
        self._open.add(connection)
        return len(self._open) <= self._limit

    def discard(self, connection: ServerConnection) -> None:
        """``connection`` is closed."""
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    def by_protocol(self) -> dict[str, int]:
        """How many there are of each protocol."""
        return dict(Counter(connection.protocol or "unknown" for connection in self._open))

    def check_time(self, now: float) -> None:
        """Cut off those that take longer than they may."""
        for connection in list(self._open):
            connection.check_time(now)

    def abort(self) -> None:
        """Cut off all."""
        for connection in list(self._open):
            connection.abort()

    async def drain(self) -> None:
        """Return when all are closed: each after its last answer, or once it has stayed idle for a moment."""
        self.draining = self.leaving = True
        for connection in list(self._open):
            connection.begin_drain()
        await self._wait_until_empty(LAST_REQUEST_S)
        for connection in list(self._open):
            connection.close_if_idle()
        await self._wait_until_empty(None)

    async def _wait_until_empty(self, timeout_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()
