"""gRPC's framing of messages (a flag, the length, the message), and the compression of messages."""

from __future__ import annotations

import struct

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.server.body_buffer import BodyBuffer
from penstock.online.server.inflating import GZIP, ZLIB
from penstock.tensor import Buffer

PREFIX = struct.Struct(">BI")
"""The prefix of a message: a flag, which is 1 if the message is compressed, and the length."""

WINDOW_BITS = {b"gzip": GZIP, b"deflate": ZLIB}
"""The ``window_bits`` of each supported encoding except identity."""
ACCEPT_ENCODING = b"identity,deflate,gzip"

_COPIED_BYTES = 1 << 14
_SMALLER = "send less, or raise 'max_request_bytes'"


class MessageReader:
    """Splits the bytes that arrive on one stream into messages.

    Holds at most one incomplete message, and the bytes passed to ``feed`` since the last call of ``next``.
    """

    __slots__ = ("_flag", "_limit", "_message", "_position", "_received")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._received: Buffer = b""
        self._position = 0
        self._message: BodyBuffer | None = None
        self._flag = 0

    @property
    def is_between(self) -> bool:
        """True if all bytes passed to ``feed`` have been returned in messages."""
        return self._message is None and self._position == len(self._received)

    @property
    def held(self) -> int:
        """Bytes of memory in use, including memory for bytes that have not arrived yet."""
        message = self._message
        return len(self._received) if message is None else len(self._received) + message.filled + message.spare

    @property
    def message_bytes(self) -> int:
        """The size of the unfinished message; 0 between messages."""
        return 0 if self._message is None else self._message.size

    @property
    def missing(self) -> int:
        """The number of bytes of the unfinished message that have not arrived."""
        return 0 if self._message is None else self._message.size - self._message.filled

    def place(self) -> memoryview | None:
        """The memory into which the next bytes may be written; None if they must be passed to ``feed``."""
        if self._message is None or self._position != len(self._received):
            return None
        return self._message.next() if self._message.spare else None

    def written(self, count: int) -> None:
        """Process ``count`` bytes that have been written to ``place()``."""
        assert self._message is not None
        self._message.advance(count)

    def feed(self, data: Buffer) -> None:
        """Add the next bytes."""
        if self._position == len(self._received):
            self._received, self._position = data, 0
            return
        if not isinstance(self._received, bytearray):
            self._received, self._position = bytearray(memoryview(self._received)[self._position :]), 0
        elif self._position:
            del self._received[: self._position]
            self._position = 0
        self._received += data

    def next(self) -> tuple[int, Buffer] | None:
        """Flag and content of the next message; None if it is incomplete. Raises ResourceExhausted if it exceeds the limit."""
        if self._message is not None:
            return self._next_piece(self._message)
        start = self._position + PREFIX.size
        if start > len(self._received):
            return None
        flag, size = PREFIX.unpack_from(self._received, self._position)
        if size > self._limit:
            raise ResourceExhausted(f"a message of {size} bytes exceeds the limit of {self._limit}", _SMALLER)
        if size <= _COPIED_BYTES and start + size <= len(self._received):
            content = bytes(memoryview(self._received)[start : start + size])
            self._advance(start + size)
            return flag, content
        self._advance(start)
        self._flag, self._message = flag, BodyBuffer(size)
        return self._next_piece(self._message)

    def _next_piece(self, message: BodyBuffer) -> tuple[int, Buffer] | None:
        size = min(message.size - message.filled, len(self._received) - self._position)
        stop = self._position + size
        with memoryview(self._received) as received:
            message.add(received[self._position : stop])
        self._advance(stop)
        if message.filled < message.size:
            return None
        self._message = None
        return self._flag, bytes(message.content()) if message.size <= _COPIED_BYTES else message.content()

    def _advance(self, position: int) -> None:
        if position == len(self._received):
            self._received, self._position = b"", 0
        else:
            self._position = position


def window_bits(flag: int, encoding: bytes) -> int:
    """The ``window_bits`` of a compressed message. Raises PenstockError if the call declares no encoding."""
    bits = WINDOW_BITS.get(encoding)
    if flag != 1 or bits is None:
        raise PenstockError("a message is marked as compressed, but the call has no grpc-encoding")
    return bits
