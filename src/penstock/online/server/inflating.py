"""Decompresses gzip and zlib data in short steps. Before each step, the caller reserves the memory that the step fills."""

from __future__ import annotations

import zlib

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.online.server.to_thread import INLINE_BYTES, STEP_BYTES, Steps
from penstock.tensor import Buffer

GZIP = 16 + zlib.MAX_WBITS
"""The argument ``window_bits`` for gzip."""
ZLIB = zlib.MAX_WBITS
"""The argument ``window_bits`` for the zlib format, which HTTP and gRPC call deflate."""
_SLICE = 1 << 16
_MAX_RATIO = 1040
"""The maximum compression ratio of deflate."""


class TooLarge(ResourceExhausted):
    """Raised if the decompressed content exceeds the limit."""

    http_status = 413


def inflate(data: Buffer, window_bits: int, limit: int) -> Steps[memoryview]:
    """Decompress ``data``, which must consist of a single gzip member or zlib stream.

    Raises TooLarge as soon as the content exceeds ``limit`` bytes. Raises InvalidArgument if ``data`` is corrupt, truncated, or
    followed by other data. Uses at most ``limit`` bytes of memory, plus the memory of one step.
    """
    whole = bytearray()
    member = zlib.decompressobj(window_bits)
    # The input is passed in slices, because zlib copies all input that it has not consumed.
    taken = told = 0
    while taken < len(data) and not member.eof:
        rest: Buffer = memoryview(data)[taken : taken + _SLICE]
        taken += len(rest)
        is_full = True
        while (rest or is_full) and not member.eof:
            most = min(_SLICE, limit - len(whole) + 1)
            if len(whole) + most > told:
                # Reserve little memory at first, because most contents are small.
                told = len(whole) + max(_SLICE, min(len(whole), STEP_BYTES))
                yield min(told, limit + 1, _MAX_RATIO * len(data))
            try:
                piece = member.decompress(rest, most)
            except zlib.error as error:
                raise InvalidArgument(f"the compressed data is corrupt: {error}") from None
            whole += piece
            if len(whole) > limit:
                raise TooLarge(
                    f"the decompressed content is larger than {limit} bytes",
                    "send less, or raise 'max_request_bytes' or 'max_json_bytes'",
                )
            rest, is_full = member.unconsumed_tail, len(piece) == most
    if not member.eof:
        raise InvalidArgument("the compressed data is truncated")
    if left := len(data) - taken + len(member.unused_data):
        raise InvalidArgument(f"the compressed data is followed by {left} bytes of other data")
    return memoryview(whole).toreadonly()


def inflate_small(data: Buffer, window_bits: int) -> bytes | None:
    """Decompress small data. Returns None if ``data`` or its content exceeds ``INLINE_BYTES``. Then use ``inflate``."""
    if len(data) > INLINE_BYTES:
        return None
    member = zlib.decompressobj(window_bits)
    try:
        content = member.decompress(data, INLINE_BYTES)
    except zlib.error:
        return None
    return content if member.eof and not member.unused_data else None
