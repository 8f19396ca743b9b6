"""KL-entropy calibration: find the window of values whose quantised histogram diverges least from the true histogram.

Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017. For a window of i bins, P is the histogram inside the window, with the
mass outside the window added to the outermost bins. Q is the histogram inside the window without that mass, merged into L levels. The
mass of each level is spread evenly over those of its bins that are not empty in P. The window with the least KL(P‖Q) is chosen.

The implementation differs from the talk in three points. First, level k of the L levels begins at bin round(i·k/L), so that
the bins left over by i / L are spread over all levels and do not all go to the last one. Second, if the values have both signs, both
ends of the window vary, and the window has all L levels. Third, the sum over bins has a closed form. Let S_k be the mass of level k in
the window, P_k the mass of level k in P, n_k the number of bins of level k that are not empty in P, and N and N_Q the total masses of
P and Q:

    KL = (Σ_b p_b log p_b - Σ_k P_k log(S_k / n_k)) / N - log N + log N_Q

With prefix sums of h, h log h and [h > 0], the sum has L terms per window instead of thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram, Range
from penstock.tensor import Array

_LEVELS = 256
_MIN_BINS = 128
"""The narrowest window to try, in bins, as in the talk. If there are more levels than bins, each bin is one level."""
_MIN_KEPT = 0.9
"""Minimum fraction of the mass inside a window. Without it, a window that has mass only in its last bin would be chosen, since P and Q
agree there. Tensors without values near zero, such as averages after a ReLU, have such windows.
"""
_COARSE = 64
"""Number of places at which the coarse scan tries one end of a window."""
_BLOCK = 128
"""Number of windows scored together; their intermediate results fit the cache."""
_ROUNDS = 4
"""Maximum number of scans of each end. Two or three usually suffice."""


def entropy_range(histogram: Histogram) -> Range:
    """The window with the least divergence. If all values have the same sign, one end is zero. Otherwise both ends are searched."""
    if histogram.min >= 0:
        return Range(0.0, min(_threshold(histogram.counts[BINS:], histogram.bin_width), histogram.max))
    if histogram.max <= 0:
        threshold = _threshold(histogram.counts[BINS - 1 :: -1], histogram.bin_width)
        return Range(max(-threshold, histogram.min), 0.0)
    low, high = best_window(histogram.counts)
    return Range(
        max((low - BINS - 0.5) * histogram.bin_width, histogram.min),
        min((high - BINS + 0.5) * histogram.bin_width, histogram.max),
    )


def best_window(counts: Array) -> tuple[int, int]:
    """The best window [low, high) around the middle of ``counts``, shape (4096,). Optimises both ends in turn until neither changes.

    A scan of one end first tries coarsely spaced bins, then every bin near the best of them. It never increases the divergence.
    """
    windows = _Windows(counts, _LEVELS)
    filled = np.flatnonzero(counts)
    first, last = int(filled[0]), int(filled[-1]) + 1
    low, high = first, last
    if last - first <= _MIN_BINS:
        return low, high
    for _ in range(_ROUNDS):
        before = low, high
        high = _scan(partial(windows.divergences, low), high, BINS + 1, last)
        low = _scan(partial(windows.divergences, highs=high), low, first, BINS - 1)
        if (low, high) == before:
            break
    return low, high


class _Windows:
    """Bin counts with their prefix sums, from which the divergence of any window is computed."""

    def __init__(self, counts: Array, levels: int) -> None:
        self._levels = levels
        self._counts = counts.astype(np.float64)
        self._mass = _prefix_sum(self._counts)
        self._filled = _prefix_sum(counts > 0).astype(np.intp)
        self._logarithms = _log(np.arange(counts.size + 1))
        self._entropy = _prefix_sum(_x_log_x(self._counts))

    def divergences(self, lows: Array | int, highs: Array | int) -> Array:
        """KL(P‖Q) of each window [low, high) of bins, shape (windows,).

        Infinite if a window is too narrow or contains too little mass, or if mass outside belongs to a level that is empty inside.
        """
        lows, highs = np.broadcast_arrays(lows, highs)
        kept = self._mass[highs] - self._mass[lows]
        eligible = np.flatnonzero((kept >= _MIN_KEPT * self._mass[-1]) & (highs - lows >= _MIN_BINS))
        result = np.full(lows.size, np.inf)
        for start in range(0, eligible.size, _BLOCK):
            block = eligible[start : start + _BLOCK]
            result[block] = self._block(lows[block], highs[block])
        return result

    def _block(self, lows: Array, highs: Array) -> Array:
        levels = self._levels
        rows = np.arange(lows.size)
        widths = highs - lows
        used = np.minimum(levels, widths)[:, None]
        steps = np.minimum(np.arange(levels + 1), used)
        # Exact, since ``used`` is a power of two or the width itself.
        borders = lows[:, None] + np.floor(steps * (widths[:, None] / used) + 0.5).astype(np.intp)

        inside = np.diff(np.take(self._mass, borders), axis=1)
        filled = np.diff(np.take(self._filled, borders), axis=1)
        below, above = self._mass[lows], self._mass[-1] - self._mass[highs]
        first, last = self._counts[lows], self._counts[highs - 1]
        ends = used[:, 0] - 1
        filled[:, 0] += (first == 0) & (below > 0)
        filled[rows, ends] += (last == 0) & (above > 0)

        kept = self._mass[highs] - self._mass[lows]
        lost = (inside[:, 0] == 0) & (below > 0) | (inside[rows, ends] == 0) & (above > 0)
        logs = _log(inside)
        logs -= np.take(self._logarithms, filled)
        cross = np.einsum("ij,ij->i", inside, logs) + below * logs[:, 0] + above * logs[rows, ends]
        entropy = self._entropy[highs] - self._entropy[lows]
        entropy += _x_log_x(first + below) - _x_log_x(first) + _x_log_x(last + above) - _x_log_x(last)
        total = self._mass[-1]
        return np.where(lost, np.inf, (entropy - cross) / total - np.log(total) + _log(kept))


def divergences(counts: Array, lows: Array | int, highs: Array, levels: int) -> Array:
    """KL(P‖Q) of the windows [lows, highs) of ``counts``, [windows]; infinite if undefined. ``levels`` is a power of two."""
    return _Windows(counts, levels).divergences(lows, highs)


def _threshold(counts: Array, bin_width: float) -> float:
    """The upper end (m + 0.5)·w of the best window that begins at zero. ``counts`` are the bins from zero upwards."""
    filled = np.flatnonzero(counts)
    bins = int(filled[-1]) + 1 if filled.size else 0
    if bins <= _MIN_BINS:
        return (bins + 0.5) * bin_width
    highs = np.arange(_MIN_BINS, bins + 1)
    scores = divergences(counts[:bins], 0, highs, _LEVELS)
    return (float(highs[np.argmin(scores)]) + 0.5) * bin_width


def _scan(score: Callable[[Array], Array], current: int, start: int, stop: int) -> int:
    """The place from ``start`` to ``stop`` with the lowest score, found by a coarse and a fine scan. Ties go to ``current``."""
    step = max(1, (stop - start) // _COARSE)
    coarse = np.array([current, *range(start, stop, step), stop])
    best = int(coarse[np.argmin(score(coarse))])
    fine = np.array([best, *range(max(start, best - step), min(stop, best + step) + 1)])
    return int(fine[np.argmin(score(fine))])


def _prefix_sum(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


def _x_log_x(counts: Array) -> Array:
    return counts * _log(counts)


def _log(counts: Array) -> Array:
    """The logarithm of whole numbers, and 0 for 0."""
    result: Array = np.log(np.maximum(counts, 1.0))
    return result
