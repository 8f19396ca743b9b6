"""HTTP content encodings: compression and decompression with gzip and deflate. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from penstock.online.server import inflating
from penstock.online.server.to_thread import STEP_BYTES, Steps
from penstock.tensor import Buffer

_WINDOW = {b"gzip": inflating.GZIP, b"x-gzip": inflating.GZIP, b"deflate": inflating.ZLIB}
_LEVEL = 1
_PACKER_BYTES = 272 << 10
"""Bytes of memory that a compressor takes."""

ENCODINGS = b"gzip, deflate"
"""The supported encodings, as a header value. ``deflate`` is the zlib format, as HTTP defines it."""


def knows(encoding: bytes) -> bool:
    """True if bodies of ``encoding`` (in lower case) can be decompressed."""
    return encoding in _WINDOW


def inflate(body: Buffer, encoding: bytes, limit: int) -> Steps[memoryview]:
    """Decompress ``body`` to at most ``limit`` bytes. Raises TooLarge, InvalidArgument."""
    return inflating.inflate(body, _WINDOW[encoding], limit)


def inflate_small(body: Buffer, encoding: bytes) -> bytes | None:
    """Decompress a small body. Returns None if ``body`` or its content is large. Then use ``inflate``."""
    return inflating.inflate_small(body, _WINDOW[encoding])


def headers(encoding: bytes) -> bytes:
    """The header lines of a response with ``encoding``; empty for identity."""
    return b"Content-Encoding: %b\r\nVary: Accept-Encoding\r\n" % encoding if encoding else b""


def compress(parts: Sequence[Buffer], encoding: bytes) -> Steps[bytes]:
    """Join and compress ``parts`` at the fastest level, because higher levels hardly make floats smaller."""
    size = sum(map(len, parts))
    # If one step suffices, the compressor exists only during this step.
    beside = _PACKER_BYTES if size > STEP_BYTES else 0
    packed = bytearray()
    room = min(size, STEP_BYTES)
    yield beside + room
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    for part in parts:
        rest = memoryview(part)
        while rest:
            if not room:
                room = STEP_BYTES
                yield beside + len(packed) + room
            piece, rest = rest[:room], rest[room:]
            packed += packer.compress(piece)
            room -= len(piece)
    return bytes(packed + packer.flush())


def preferred(accept: bytes) -> bytes:
    """The supported encoding with the greatest weight in an ``Accept-Encoding`` header; empty for identity.

    With equal weights, gzip precedes deflate, and both precede identity.
    """
    given = weights(accept)
    others = given.get(b"*", 0.0)
    best = max((b"gzip", b"deflate"), key=lambda name: given.get(name, others))
    return best if 0.0 < given.get(best, others) >= given.get(b"identity", 0.0) else b""


def weights(accept: bytes) -> dict[bytes, float]:
    """The weight of each item of an ``Accept…`` header, by the item's name in lower case."""
    found: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, _, weight = item.partition(b";")
        found[name.strip()] = _weight(weight)
    return found


def _weight(text: bytes) -> float:
    """The weight in a parameter such as ``q=0.5``: 1 if ``text`` is empty, 0 if it is invalid."""
    name, is_given, value = text.partition(b"=")
    if not is_given:
        return 0.0 if name.strip() else 1.0
    try:
        weight = float(value)
    except ValueError:
        return 0.0
    return weight if name.strip() == b"q" and 0 <= weight <= 1 else 0.0
