"""HTTP content encodings: compresses and decompresses gzip and deflate. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.online.server.offload import STEP_BYTES, Steps
from penstock.tensor import Buffer

_WINDOW = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_LEVEL = 1
_SLICE = 1 << 16
_MAX_RATIO = 1040
"""Deflate makes data at most 1032 times smaller."""

ENCODINGS = b"gzip, deflate"
"""The supported encodings, in the form of a header. ``deflate`` is the zlib format, as HTTP defines it."""


class TooLarge(ResourceExhausted):
    """The decompressed body exceeds the limit."""

    http_status = 413


def knows(encoding: bytes) -> bool:
    """True if bodies of ``encoding`` (in lower case) can be decompressed."""
    return encoding in _WINDOW


def inflate(body: Buffer, encoding: bytes, limit: int) -> Steps[bytearray]:
    """Decompress the only member of ``body``.

    Raises TooLarge as soon as there are more than ``limit`` bytes, and InvalidArgument if ``body`` is corrupt, truncated, or
    followed by other data. The result never exceeds ``limit`` by more than one step.
    """
    whole = bytearray()
    member = zlib.decompressobj(_WINDOW[encoding])
    # In slices, since zlib copies all input that it has not consumed.
    taken = told = 0
    while taken < len(body) and not member.eof:
        rest: Buffer = memoryview(body)[taken : taken + _SLICE]
        taken += len(rest)
        is_full = True
        while (rest or is_full) and not member.eof:
            most = min(_SLICE, limit - len(whole) + 1)
            if len(whole) + most > told:
                # Small at first, since most bodies are.
                told = len(whole) + max(_SLICE, min(len(whole), STEP_BYTES))
                yield min(told, limit + 1, _MAX_RATIO * len(body))
            try:
                piece = member.decompress(rest, most)
            except zlib.error as error:
                raise InvalidArgument(f"the body is not {encoding.decode()}: {error}") from None
            whole += piece
            if len(whole) > limit:
                raise TooLarge(f"the decompressed body is larger than {limit} bytes")
            rest, is_full = member.unconsumed_tail, len(piece) == most
    if not member.eof:
        raise InvalidArgument("the compressed body is truncated")
    if left := len(body) - taken + len(member.unused_data):
        raise InvalidArgument(f"the compressed body is followed by {left} bytes of other data")
    return whole


def compress(parts: Iterable[Buffer], encoding: bytes) -> Steps[bytes]:
    """Join and compress ``parts`` at the fastest level: higher levels hardly make floats smaller."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    packed = bytearray()
    for part in parts:
        for start in range(0, len(part), STEP_BYTES):
            yield len(packed) + STEP_BYTES
            packed += packer.compress(memoryview(part)[start : start + STEP_BYTES])
    return bytes(packed + packer.flush())


def preferred(accept: bytes) -> bytes:
    """The supported encoding with the greatest weight in the header ``Accept-Encoding``; empty for identity.

    At equal weights gzip precedes deflate, and both precede identity.
    """
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, _, weight = item.partition(b";")
        weights[name.strip()] = _weight(weight)
    others = weights.get(b"*", 0.0)
    best = max((b"gzip", b"deflate"), key=lambda name: weights.get(name, others))
    return best if 0.0 < weights.get(best, others) >= weights.get(b"identity", 0.0) else b""


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
