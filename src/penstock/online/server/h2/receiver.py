"""Receives the rest of a large DATA frame: the system writes it to where its message is put together."""

from __future__ import annotations

import asyncio
from typing import Protocol

_DISCARDED_BYTES = 1 << 16


class FrameOwner(Protocol):
    """The connection that the frame comes in on."""

    def place(self) -> memoryview | None:
        """Where the next bytes go; None if they are to be received in the usual way."""

    def written(self, count: int) -> None:
        """``count`` bytes have been written there."""

    def take_back(self, data: bytes) -> None:
        """Receive ``data`` and what comes after in the usual way."""

    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class FrameReceiver(asyncio.BufferedProtocol):
    """Stands in for a connection at its transport until the frame is complete or its call has ended. Belongs to the event loop."""

    __slots__ = ("_owner", "_unwanted")

    def __init__(self, owner: FrameOwner) -> None:
        self._owner = owner
        self._unwanted: bytearray | None = None

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        place = self._owner.place()
        if place is not None:
            return place
        # The call has ended meanwhile, which the connection has to find out for itself.
        self._unwanted = bytearray(_DISCARDED_BYTES)
        return self._unwanted

    def buffer_updated(self, nbytes: int) -> None:
        if self._unwanted is None:
            self._owner.written(nbytes)
        else:
            self._owner.take_back(bytes(memoryview(self._unwanted)[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
