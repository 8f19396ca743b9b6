"""The rest of a large body on its way in: the system writes it to where its tensors will be read, and nobody copies it again."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.online.server.room import Room
from penstock.tensor import Buffer


class Owner(Protocol):
    """The connection that the body comes in on."""

    def has_room(self, size: int) -> bool:
        """Whether ``size`` bytes of memory may be held for the body; if not, the request has been refused."""

    def body_received(self, body: memoryview) -> None:
        """All of the body is there."""

    def eof_received(self) -> bool: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection at its transport until its body is complete. Belongs to the event loop."""

    __slots__ = ("_owner", "_room")

    def __init__(self, owner: Owner, size: int, json_length: int) -> None:
        """For a body of ``size`` bytes, whose tensors begin after ``json_length`` bytes."""
        self._owner = owner
        self._room = Room(size, json_length)

    def begin(self, content: Buffer) -> bool:
        """Take what has come already, which is not all; whether there is room for more of it."""
        if not self._owner.has_room(self._room.wanted(len(content))):
            return False
        self._room.add(content)
        return True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room.next()

    def buffer_updated(self, nbytes: int) -> None:
        room = self._room
        room.advance(nbytes)
        if room.filled == room.size:
            self._owner.body_received(room.content())
        elif not room.spare and self._owner.has_room(room.wanted(0)):
            room.grow()

    def eof_received(self) -> bool:
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
