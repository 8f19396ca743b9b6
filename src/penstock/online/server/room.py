"""Memory for something large that comes in piece by piece, and whose size is known from the beginning."""

from __future__ import annotations

import numpy as np

from penstock.tensor import Buffer

_ALIGNMENT = 64
_GROWTH = 8


class Room:
    """What is only announced may never come: there is never more memory than ``_GROWTH`` times what has arrived.

    Nothing but what has arrived can be read of it.
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
        """Bytes of memory that wait for what has not arrived yet."""
        return len(self._memory) - self.filled

    def wanted(self, count: int) -> int:
        """How much memory there will be after ``grow(count)``."""
        return max(len(self._memory), min(self.size, _GROWTH * (self.filled + count)))

    def grow(self, count: int = 0) -> None:
        """Make memory for what comes next, where the next ``count`` bytes, at most all that are missing, are here already."""
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
        """Take what comes next: not more than is missing."""
        count = len(data)
        self.grow(count)
        self._memory[self.filled : self.filled + count] = data
        self.filled += count

    def next(self) -> memoryview:
        """Where the next bytes go; empty if there has to be more memory first."""
        return self._memory[self.filled :]

    def advance(self, count: int) -> None:
        """``count`` bytes have been written to ``next()``."""
        self.filled += count

    def content(self) -> memoryview:
        """What has arrived, to be read."""
        return self._memory[: self.filled].toreadonly()
