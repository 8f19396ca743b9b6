"""Choose the range that a tensor's integers cover, from the tensor's statistics.

Values beyond the range cause a clipping error. A wider range has coarser steps, which cause a rounding error. The methods weigh the
two errors differently, and none is best for all tensors, so a build tries several methods and measures the results.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import numpy as np

from penstock.offline.compress.ptq.ranges.entropy import entropy_range
from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram, Range, TensorStatistics
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array

_GRID = 100
_GOLDEN_STEPS = 24
_GOLDEN = (5**0.5 - 1) / 2


class RangeMethod(enum.Enum):
    """A method that chooses a range."""

    MIN_MAX = "min-max"
    """Cover all values seen in calibration. Nothing is clipped, but one outlier makes every step coarse."""
    PERCENTILE = "percentile"
    """Clip a fixed proportion of the values."""
    MSE = "mse"
    """Minimise the mean squared error after rounding and clipping."""
    ENTROPY = "entropy"
    """Minimise the KL divergence between the true and the rounded distribution."""


def ranges(
    statistics: Mapping[str, TensorStatistics], method: RangeMethod, scheme: IntegerScheme, percentile: float = 99.99
) -> dict[str, Range]:
    """The range of every tensor, by name, except tensors that were always empty.

    Constant tensors and tensors that must not be clipped get min-max with every method. ``percentile`` is the percentage of values
    that ``RangeMethod.PERCENTILE`` keeps. Every range contains zero, so that an integer represents zero exactly.
    """
    found: dict[str, Range] = {}
    for name, known in statistics.items():
        histogram = known.histogram
        if known.fixed is not None:
            found[name] = known.fixed
        elif histogram.count and (histogram.is_constant or not known.clippable):
            found[name] = min_max_range(histogram)
        elif histogram.count:
            match method:
                case RangeMethod.MIN_MAX:
                    found[name] = min_max_range(histogram)
                case RangeMethod.PERCENTILE:
                    found[name] = percentile_range(histogram, percentile)
                case RangeMethod.MSE:
                    found[name] = mse_range(histogram, scheme)
                case RangeMethod.ENTROPY:
                    found[name] = entropy_range(histogram)
    return found


def min_max_range(histogram: Histogram) -> Range:
    """The range that covers all values of the histogram, and zero."""
    return Range(min(histogram.min, 0.0), max(histogram.max, 0.0))


def percentile_range(histogram: Histogram, percentile: float) -> Range:
    """Cut off (100 - ``percentile``) / 2 % of the values at each end, with interpolation inside the bins."""
    share = (1 - percentile / 100) / 2
    low, high = np.interp([share * histogram.count, (1 - share) * histogram.count], *_distribution(histogram))
    return Range(min(max(float(low), histogram.min), 0.0), max(min(float(high), histogram.max), 0.0))


def mse_range(histogram: Histogram, scheme: IntegerScheme) -> Range:
    """The range with the least squared error, found by quantising the histogram.

    Tries 100 thresholds, and refines the best threshold by golden-section search between its neighbours. First, both ends of the range
    shrink together, then each end separately.
    """
    error = squared_error(histogram, scheme)
    widest = min_max_range(histogram)

    def scaled(low: Array, high: Array) -> Array:
        return error(widest.low * low, widest.high * high)

    both = _minimise(lambda share: scaled(share, share))
    if widest.low == 0 or widest.high == 0:
        return Range(widest.low * both, widest.high * both)
    high = _minimise(lambda share: scaled(np.full_like(share, both), share))
    low = _minimise(lambda share: scaled(share, np.full_like(share, high)))
    return Range(widest.low * low, widest.high * high)


def _distribution(histogram: Histogram) -> tuple[Array, Array]:
    """The cumulative number of values at each edge of the bins, and these edges. Exact zeros are a step at the edge 0."""
    cumulative = np.concatenate([[0], np.cumsum(histogram.counts)])
    cumulative[BINS + 1 :] += histogram.zeros
    at_zero = cumulative[BINS] + histogram.zeros
    return np.insert(cumulative, BINS + 1, at_zero), np.insert(histogram.edges, BINS + 1, 0.0)


def squared_error(histogram: Histogram, scheme: IntegerScheme) -> Callable[[Array, Array], Array]:
    """A function of the lower and upper ends of n ranges. It returns Σ count·(dequantise(quantise(x)) - x)² for each range."""
    filled = np.flatnonzero(histogram.counts)
    counts = histogram.counts[filled].astype(np.float64)
    values = histogram.centres[filled]
    smallest, largest = scheme.activation_limits

    def error(low: Array, high: Array) -> Array:
        scale, zero_point = (numbers[:, None] for numbers in scheme.parameters(low, high))
        integers = np.clip(np.round(values / scale) + zero_point, smallest, largest)
        distance = (integers - zero_point) * scale - values
        return np.asarray((distance * distance) @ counts)

    return error


def _minimise(error: Callable[[Array], Array]) -> float:
    """The fraction in (0, 1] with the least error. Golden section refines the best point of a grid."""
    grid = np.arange(1, _GRID + 1) / _GRID
    scores = error(grid)
    best = int(np.argmin(scores))
    tried = [(float(scores[best]), float(grid[best]))]
    left, right = float(grid[best]) - 1 / _GRID, min(float(grid[best]) + 1 / _GRID, 1.0)
    left = max(left, 0.1 / _GRID)
    for _ in range(_GOLDEN_STEPS):
        inner = np.array([right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)])
        scores = error(inner)
        tried += zip(scores.tolist(), inner.tolist(), strict=True)
        left, right = (left, float(inner[1])) if scores[0] <= scores[1] else (float(inner[0]), right)
    return min(tried)[1]
