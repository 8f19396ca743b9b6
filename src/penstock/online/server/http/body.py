"""Receives the rest of a large body: the system writes it to where its tensors will be read, without another copy."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.online.server.body_buffer import BodyBuffer
from penstock.tensor import Buffer


class BodyOwner(Protocol):
    """The connection that the body comes in on."""

    def reserve_body(self, size: int) -> bool:
        """Whether ``size`` bytes of memory may be held for the body; if not, the request has been refused."""

    def body_received(self, body: memoryview) -> None:
        """All of the body is there."""

    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection at its transport until its body is complete. Belongs to the event loop."""

    __slots__ = ("_buffer", "_owner")

    def __init__(self, owner: BodyOwner, size: int, json_length: int) -> None:
        """For a body of ``size`` bytes, whose tensors begin after ``json_length`` bytes."""
        self._owner = owner
        self._buffer = BodyBuffer(size, json_length)

    def begin(self, content: Buffer) -> bool:
        """Take what has come already, which is not all; whether there is room for more of it."""
        if not self._owner.reserve_body(self._buffer.wanted(len(content))):
            return False
        self._buffer.add(content)
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.next()

    def buffer_updated(self, nbytes: int) -> None:
        buffer = self._buffer
        buffer.advance(nbytes)
        if buffer.filled == buffer.size:
            self._owner.body_received(buffer.content())
        elif not buffer.spare and self._owner.reserve_body(buffer.wanted(0)):
            buffer.grow()

    def eof_received(self) -> bool:
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
