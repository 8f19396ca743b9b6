"""Memory for a large body or message of known size that arrives in pieces."""

from __future__ import annotations

import mmap
import sys

import numpy as np

from penstock.tensor import Array, Buffer

READ_BYTES = 256 << 10
"""Maximum bytes to read at once. A larger read into newly allocated memory would take milliseconds."""
_ALIGNMENT = 64
_GROWTH = 8
_HUGE_BYTES = 4 << 20
"""From this size on, numpy asks the kernel for huge pages."""


class BodyBuffer:
    """A buffer of at most ``_GROWTH`` times the received bytes, because a client may announce more bytes than it sends.

    Only received bytes can be read.
    """

    __slots__ = ("_aligned", "_memory", "filled", "size")

    def __init__(self, size: int, aligned: int = 0) -> None:
        """Create a buffer for ``size`` bytes. The byte at offset ``aligned``, where the tensors begin, is aligned in memory."""
        self.size = size
        self.filled = 0
        """The number of bytes received."""
        self._aligned = aligned
        self._memory = memoryview(b"")

    @property
    def spare(self) -> int:
        """The number of allocated bytes that are not filled yet."""
        return len(self._memory) - self.filled

    def wanted(self, count: int) -> int:
        """The size of the memory after ``grow(count)``, in bytes."""
        return max(len(self._memory), min(self.size, _GROWTH * (self.filled + count)))

    def grow(self, count: int = 0) -> None:
        """Make room for more bytes, including ``count`` bytes that have arrived but are not in the buffer yet."""
        if self.spare > count or len(self._memory) == self.size:
            return
        size = self.wanted(count)
        # The memory is not cleared, because clearing would take as long as copying.
        memory = _allocate(size + _ALIGNMENT)
        start = -(memory.__array_interface__["data"][0] + self._aligned) % _ALIGNMENT
        found = memory.data[start : start + size]
        found[: self.filled] = self._memory[: self.filled]
        self._memory = found

    def add(self, data: Buffer) -> None:
        """Append ``data``, which must not be longer than the missing bytes."""
        count = len(data)
        self.grow(count)
        self._memory[self.filled : self.filled + count] = data
        self.filled += count

    def next(self) -> memoryview:
        """The memory for the next bytes, at most ``READ_BYTES`` long. If it is empty, call ``grow`` first."""
        return self._memory[self.filled : self.filled + READ_BYTES]

    def advance(self, count: int) -> None:
        """Count ``count`` bytes that were written to ``next()``."""
        self.filled += count

    def content(self) -> memoryview:
        """The received bytes, read-only."""
        return self._memory[: self.filled].toreadonly()


def _allocate(size: int) -> Array:
    """Uninitialized memory without huge pages. The first write to a huge page may block the event loop for 20 milliseconds."""
    if size < _HUGE_BYTES or sys.platform == "win32":
        return np.empty(size, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
