"""Fuzzes the decompression of bodies and of gRPC messages, against zlib. The first byte of a message is the encoding."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from random import Random

from penstock.online.server.http import compression
from penstock.online.server.inflating import inflate_small
from penstock.online.server.to_thread import STEP_BYTES, finish
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces
from tests.fuzz.target import DecoderTarget

_LIMIT = 1 << 17
_ENCODINGS = ((b"gzip", 31), (b"deflate", 15))
_CONTENTS = (b"", b"a", bytes(range(256)) * 9, bytes(100_000), bytes(_LIMIT), bytes(_LIMIT + 1))


def _seeds() -> list[Seed]:
    seeds = [(b"\0", *pieces(gzip.compress(content, mtime=0), 12)) for content in _CONTENTS]
    seeds += [(b"\1", *pieces(zlib.compress(content), 12)) for content in _CONTENTS]
    return [*seeds, (b"\0", gzip.compress(b"a", mtime=0), gzip.compress(b"b", mtime=0)), (b"\1",)]


class InflateTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b"\x1f\x8b\x08\x1c" + bytes(6), b"\x00\x00\x00\xff\xff", b"\x00" * 500)

    def __init__(self) -> None:
        super().__init__(_seeds())

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        if random.random() < 0.3:  # the content is tampered with, and not the compressed form
            content = b"".join(parts[1:])
            return (
                (b"\0" + gzip.compress(content, 1, mtime=0))
                if random.random() < 0.5
                else b"\1" + zlib.compress(content)
            )
        return b"".join(parts)

    def decode(self, data: bytes) -> object:
        encoding, bits = _ENCODINGS[data[0] % 2 if data else 0]
        body = data[1:]
        expected = _expected(body, bits)
        assert inflate_small(body, bits) in (None, expected)
        held, steps = 0, compression.inflate(body, encoding, _LIMIT)
        for held in steps:
            assert held <= _LIMIT + 1 + STEP_BYTES
        del held
        whole = finish(compression.inflate(body, encoding, _LIMIT))
        assert bytes(whole) == expected
        return bytes(whole)


def _expected(body: bytes, bits: int) -> bytes | None:
    """The first member of ``body``, or one byte more than the limit of it; None if it is corrupt."""
    inflater = zlib.decompressobj(bits)
    try:
        content = inflater.decompress(body, _LIMIT + 1)
    except zlib.error:
        return None
    return content if inflater.eof or len(content) > _LIMIT else None
