"""Decompresses gzip and zlib data in steps, so that memory is counted before it is filled, and no step takes long."""

from __future__ import annotations

import zlib

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.tensor import Buffer

STEP_BYTES = 1 << 20
"""Bytes to produce in one step on another thread."""

_SLICE = 1 << 16


class Inflater:
    """Decompresses the first member of ``data``. Its steps may run on different threads, one after the other."""

    __slots__ = ("_data", "_inflater", "_limit", "_taken", "_whole")

    def __init__(self, data: Buffer, window_bits: int, limit: int) -> None:
        """``window_bits`` as zlib has it: 31 for gzip, 15 for zlib. ``limit``: maximum bytes of the content."""
        self._data = memoryview(data)
        self._inflater = zlib.decompressobj(window_bits)
        self._limit = limit
        self._taken = 0
        self._whole = bytearray()

    @property
    def content(self) -> memoryview:
        """What has been decompressed so far, read-only."""
        return memoryview(self._whole).toreadonly()

    def step(self, most: int = STEP_BYTES) -> bool:
        """Decompress up to ``most`` (>= 1) further bytes; returns True once the content is complete.

        Raises ResourceExhausted as soon as the content exceeds the limit, and InvalidArgument if the data is corrupt or cut off.
        """
        inflater = self._inflater
        end = min(len(self._whole) + most, self._limit + 1)
        while not inflater.eof and len(self._whole) < end:
            # In slices, since zlib copies all input that it has not consumed.
            rest: Buffer = inflater.unconsumed_tail
            if not rest:
                rest = self._data[self._taken : self._taken + _SLICE]
                self._taken += len(rest)
            try:
                piece = inflater.decompress(rest, end - len(self._whole))
            except zlib.error:
                raise InvalidArgument("the compressed data is corrupt") from None
            if not rest and not piece:
                raise InvalidArgument("the compressed data is cut off")
            self._whole += piece
        if len(self._whole) > self._limit:
            raise ResourceExhausted(
                f"the decompressed content exceeds the limit of {self._limit} bytes",
                "send less, or raise 'max_request_bytes'",
            )
        return inflater.eof
