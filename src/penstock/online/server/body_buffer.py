"""Memory for a large body or message that arrives piece by piece, and whose size is known from the start."""

from __future__ import annotations

import numpy as np

from penstock.tensor import Buffer

_ALIGNMENT = 64
_GROWTH = 8


class BodyBuffer:
    """Grows with what has arrived, to at most ``_GROWTH`` times that: announced bytes may never come.

    Only bytes that have arrived can be read.
    """

    __slots__ = ("_aligned", "_memory", "filled", "size")

    def __init__(self, size: int, aligned: int = 0) -> None:
        """For ``size`` bytes, of which those from number ``aligned`` on are to lie aligned, as tensors do."""
        self.size = size
        self.filled = 0
        """Bytes that have arrived."""
        self._aligned = aligned
        self._memory = memoryview(b"")

    @property
    def spare(self) -> int:
        """Bytes of memory that are not filled yet."""
        return len(self._memory) - self.filled

    def wanted(self, count: int) -> int:
        """The memory that ``grow(count)`` leads to, in bytes."""
        return max(len(self._memory), min(self.size, _GROWTH * (self.filled + count)))

    def grow(self, count: int = 0) -> None:
        """Make room for the bytes that follow; ``count`` of them, at most all that are missing, have already arrived."""
        if self.spare > count or len(self._memory) == self.size:
            return
        size = self.wanted(count)
        # Not cleared, which would take as long as copying.
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -(memory.__array_interface__["data"][0] + self._aligned) % _ALIGNMENT
        found = memory.data[start : start + size]
        found[: self.filled] = self._memory[: self.filled]
        self._memory = found

    def add(self, data: Buffer) -> None:
        """Append ``data``, which is at most as long as what is missing."""
        count = len(data)
        self.grow(count)
        self._memory[self.filled : self.filled + count] = data
        self.filled += count

    def next(self) -> memoryview:
        """The memory for the next bytes; empty if ``grow`` has to be called first."""
        return self._memory[self.filled :]

    def advance(self, count: int) -> None:
        """``count`` bytes have been written to ``next()``."""
        self.filled += count

    def content(self) -> memoryview:
        """What has arrived, read-only."""
        return self._memory[: self.filled].toreadonly()
