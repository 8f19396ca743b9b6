"""The histogram of one tensor. The histogram's size does not depend on the number of values.

The histogram covers [-R, R) with 2048 bins on each side. R is the smallest power of two above the largest magnitude seen so far.
When a larger value arrives, R doubles and neighbouring bins merge in pairs. Scaling by a power of two is exact in floating point,
so bin counts are exact and do not depend on how the data were split into batches.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from penstock.errors import InvalidData
from penstock.tensor import Array

BINS = 2048
"""Bins on each side of zero."""

# Bounds of R. Beyond them, the factor from value to bin would not be a normal float32.
_MIN_EXPONENT = -110
_CHUNK = 1 << 18
"""Number of elements processed together. They fit into the cache, and the temporary memory does not grow with the batch."""


class Range(msgspec.Struct, frozen=True):
    """The interval of real values that the integers cover. It always contains zero."""

    low: float
    high: float


class Histogram:
    """Counts one tensor's values, and keeps their minimum and maximum. Zeros are counted separately. Takes about 32 KiB.

    ``counts[BINS + k]`` counts the nonzero values in [k·w, (k+1)·w) for w = ``bin_width`` and -2048 <= k < 2048.
    """

    __slots__ = ("count", "counts", "exponent", "max", "min", "zeros")

    def __init__(self) -> None:
        self.counts = np.zeros(2 * BINS, np.int64)
        self.zeros = 0
        self.count = 0
        self.min = math.inf
        self.max = -math.inf
        self.exponent = _MIN_EXPONENT
        """log2 of R."""

    @property
    def bin_width(self) -> float:
        return math.ldexp(1.0, self.exponent) / BINS

    @property
    def edges(self) -> Array:
        """The 4097 borders of the bins, float64."""
        return np.arange(-BINS, BINS + 1) * self.bin_width

    @property
    def centres(self) -> Array:
        """The middle of each of the 4096 bins, float64, clipped to the extremes."""
        return np.clip(self.edges[:-1] + self.bin_width / 2, self.min, self.max)

    @property
    def is_constant(self) -> bool:
        """True if all values are the same, or there are none."""
        return self.min >= self.max

    def update(self, array: Array) -> None:
        """Add all elements of a float ``array`` of any shape. Raises InvalidData on NaN or infinity."""
        flat = array.reshape(-1)
        if flat.dtype not in (np.float32, np.float64):
            flat = flat.astype(np.float32)
        for start in range(0, flat.size, _CHUNK):
            self._add(flat[start : start + _CHUNK])

    def _add(self, chunk: Array) -> None:
        low, high = float(chunk.min()), float(chunk.max())
        # A NaN in the chunk makes both extremes NaN.
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidData("the values contain NaN or infinity", "remove such samples, or repair the model")
        self._cover(max(-low, high))
        factor = chunk.dtype.type(1.0 / self.bin_width)
        bins = np.floor(chunk * factor).astype(np.intp)
        bins += BINS
        zeros = chunk.size - int(np.count_nonzero(chunk))
        self.counts += np.bincount(bins, minlength=2 * BINS)
        self.counts[BINS] -= zeros
        self.zeros += zeros
        self.min, self.max = min(self.min, low), max(self.max, high)
        self.count += chunk.size

    def _cover(self, magnitude: float) -> None:
        """Double R until it is above ``magnitude``."""
        exponent = max(math.frexp(magnitude)[1], self.exponent)
        self.counts, self.exponent = self.counts_for(exponent), exponent

    def counts_for(self, exponent: int) -> Array:
        """The counts of the bins for R = 2^``exponent``, which is at least ``self.exponent``."""
        counts = self.counts
        # After twelve doublings, all counts are in the two bins next to zero, and further doublings do not move them.
        for _ in range(min(exponent - self.exponent, 12)):
            counts = np.pad(counts.reshape(-1, 2).sum(axis=1), BINS // 2)
        return counts


class TensorStatistics(msgspec.Struct, frozen=True):
    """A tensor's histogram, and facts about its range that follow from the graph."""

    histogram: Histogram
    clippable: bool = True
    """False if the largest values must not be clipped, as in logits, attention scores and masks."""
    fixed: Range | None = None
    """The range that follows from the operator that writes the tensor, e.g. 0 to 1 for Softmax."""
