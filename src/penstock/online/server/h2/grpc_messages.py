"""gRPC's framing of messages (a flag, a length, the message) and their compression, over pieces cut anywhere."""

from __future__ import annotations

import struct
import zlib

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted
from penstock.online.server.body_buffer import BodyBuffer
from penstock.tensor import Buffer

PREFIX = struct.Struct(">BI")
"""Whether the message is compressed, and its length."""

WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""Encodings that are taken besides identity, as zlib tells them apart."""
ACCEPT_ENCODING = b"identity,deflate,gzip"

_COPIED_BYTES = 1 << 14


class MessageReader:
    """Takes what a client sends on one stream piece by piece and gives it back message by message.

    It holds no more than one unfinished message and what has been fed since somebody last asked for the next one.
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
        """Whether all that was fed has been given back."""
        return self._message is None and self._position == len(self._received)

    @property
    def held(self) -> int:
        """Bytes of memory, also for what has not come yet."""
        message = self._message
        return len(self._received) if message is None else len(self._received) + message.filled + message.spare

    def place(self) -> memoryview | None:
        """Where what comes next may be written to, instead of being fed; None if it has to be fed."""
        if self._message is None or self._position != len(self._received):
            return None
        return self._message.next() if self._message.spare else None

    def written(self, count: int) -> None:
        """``count`` bytes have been written to ``place()``."""
        assert self._message is not None
        self._message.advance(count)

    def feed(self, data: Buffer) -> None:
        """Take what comes next."""
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
        """The next message as its flag and content, if all of it is there. Raises ResourceExhausted if it is too large."""
        if self._message is not None:
            return self._next_piece(self._message)
        start = self._position + PREFIX.size
        if start > len(self._received):
            return None
        flag, size = PREFIX.unpack_from(self._received, self._position)
        if size > self._limit:
            raise ResourceExhausted(f"a message of {size} bytes, more than the {self._limit} that are taken")
        self._position = start
        if start + size <= len(self._received):
            return flag, self._take(size)
        self._flag, self._message = flag, BodyBuffer(size)
        return self._next_piece(self._message)

    def _next_piece(self, message: BodyBuffer) -> tuple[int, Buffer] | None:
        size = min(message.size - message.filled, len(self._received) - self._position)
        stop = self._position + size
        with memoryview(self._received) as received:
            message.add(received[self._position : stop])
        if stop == len(self._received):
            self._received, self._position = b"", 0
        else:
            self._position = stop
        if message.filled < message.size:
            return None
        self._message = None
        return self._flag, bytes(message.content()) if message.size <= _COPIED_BYTES else message.content()

    def _take(self, size: int) -> Buffer:
        start, stop = self._position, self._position + size
        received = self._received
        content: Buffer
        if size <= _COPIED_BYTES or isinstance(received, bytearray):
            # A view would keep all that was received along with it, and a bytearray from growing.
            content = bytes(memoryview(received)[start:stop])
        else:
            content = memoryview(received)[start:stop]
        if stop == len(received):
            self._received, self._position = b"", 0
        else:
            self._position = stop
        return content


def content_of(flag: int, message: Buffer, encoding: bytes, limit: int) -> Buffer:
    """The message itself, uncompressed. Raises PenstockError, and of it ResourceExhausted if it has over ``limit`` bytes."""
    if flag == 0:
        return message
    bits = WINDOW_BITS.get(encoding)
    if flag != 1 or bits is None:
        raise PenstockError("a message is marked as compressed, but no encoding was agreed on")
    inflater = zlib.decompressobj(bits)
    try:
        content = inflater.decompress(message, limit + 1)
    except zlib.error:
        raise InvalidArgument(f"a message is not {encoding.decode()}") from None
    if len(content) > limit:
        raise ResourceExhausted(f"a message has more than the {limit} bytes that are taken")
    if not inflater.eof:
        raise InvalidArgument(f"a compressed message ends before its {encoding.decode()} does")
    return content
