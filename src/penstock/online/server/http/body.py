"""Receives the missing bytes of a large body directly into the memory of its tensors, without an intermediate copy."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.online.server.body_buffer import BodyBuffer
from penstock.tensor import Buffer


class BodyOwner(Protocol):
    """The connection that receives the body."""

    def reserve_body(self, size: int) -> bool:
        """Reserve ``size`` bytes for the body. If there is too little memory, refuse the request and return False."""

    def charge_body(self, received: int) -> None:
        """Charge ``received`` bytes to the connection's turn. Pause reading if the turn is used up."""

    def body_received(self, body: memoryview) -> None:
        """Continue with the complete body."""

    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Replaces the connection as the transport's protocol until the body is complete. Used only on the event loop."""

    __slots__ = ("_buffer", "_owner")

    def __init__(self, owner: BodyOwner, size: int, json_length: int) -> None:
        """Receive a body of ``size`` bytes. Its tensors follow the first ``json_length`` bytes."""
        self._owner = owner
        self._buffer = BodyBuffer(size, json_length)

    def begin(self, content: Buffer) -> bool:
        """Add the bytes that have arrived so far. Returns False if the memory for the body cannot be reserved."""
        if not self._owner.reserve_body(self._buffer.wanted(len(content))):
            return False
        self._buffer.add(content)
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.next()

    def buffer_updated(self, nbytes: int) -> None:
        buffer = self._buffer
        buffer.advance(nbytes)
        self._owner.charge_body(nbytes)
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
