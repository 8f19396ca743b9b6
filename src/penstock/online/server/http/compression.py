"""Compressed bodies of HTTP: gzip and deflate, both ways. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.tensor import Buffer

_WINDOW = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_LEVEL = 1
_STEP = 1 << 20
_SLICE = 1 << 16

ENCODINGS = b"gzip, deflate"
"""What is understood, as a header lists it. ``deflate`` has the zlib wrapper, as HTTP defines it."""


class TooLarge(ResourceExhausted):
    """More than may be."""


def knows(encoding: bytes) -> bool:
    """Whether bodies of ``encoding`` (in lower case) can be read."""
    return encoding in _WINDOW


def decompress(body: Buffer, encoding: bytes, limit: int) -> bytearray:
    """The whole of ``body``, as ``inflate`` makes it."""
    whole = bytearray()
    for _ in inflate(body, encoding, limit, whole):
        pass
    return whole


def inflate(body: Buffer, encoding: bytes, limit: int, whole: bytearray) -> Iterator[int]:
    """Decompress ``body``, which has one member, into ``whole``, step by step: yields its size after each megabyte or two.

    Stops as soon as there are more than ``limit`` bytes, and raises TooLarge; InvalidArgument if ``body`` is corrupt, cut off
    or followed by anything. No more than ``limit`` and a megabyte are ever held.
    """
    told = 0
    member = zlib.decompressobj(_WINDOW[encoding])
    # In slices, since zlib copies what it has not come to yet.
    taken = 0
    while taken < len(body) and not member.eof:
        rest: Buffer = memoryview(body)[taken : taken + _SLICE]
        taken += len(rest)
        is_full = True
        while (rest or is_full) and not member.eof:
            most = min(_STEP, limit - len(whole) + 1)
            try:
                piece = member.decompress(rest, most)
            except zlib.error as error:
                raise InvalidArgument(f"the body is not {encoding.decode()}: {error}") from None
            whole += piece
            if len(whole) > limit:
                raise TooLarge(f"the decompressed body is larger than {limit} bytes")
            rest, is_full = member.unconsumed_tail, len(piece) == most
            if len(whole) - told >= _STEP:
                told = len(whole)
                yield told
    if not member.eof:
        raise InvalidArgument("the compressed body is cut off")
    if left := len(body) - taken + len(member.unused_data):
        raise InvalidArgument(f"{left} bytes are left over after the compressed body")


def compress(parts: Iterable[Buffer], encoding: bytes) -> bytes:
    """``parts`` joined, as one body. Fast rather than small: floats hardly shrink further."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])


def preferred(accept: bytes) -> bytes:
    """The encoding that the header ``Accept-Encoding`` likes best; empty for none.

    Of those that it likes equally gzip goes first, and any that it names goes before identity unless that is liked better.
    """
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, _, weight = item.partition(b";")
        weights[name.strip()] = _weight(weight)
    others = weights.get(b"*", 0.0)
    best = max((b"gzip", b"deflate"), key=lambda name: weights.get(name, others))
    return best if 0.0 < weights.get(best, others) >= weights.get(b"identity", 0.0) else b""


def _weight(text: bytes) -> float:
    """Of ``q=0.5``; 1 without, and 0 of what is none."""
    name, is_given, value = text.partition(b"=")
    if not is_given:
        return 0.0 if name.strip() else 1.0
    try:
        weight = float(value)
    except ValueError:
        return 0.0
    return weight if name.strip() == b"q" and 0 <= weight <= 1 else 0.0
