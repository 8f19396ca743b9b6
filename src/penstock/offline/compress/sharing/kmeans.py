"""Optimal k-means clustering of numbers.

In one dimension, clusters are intervals of the sorted values, so dynamic programming finds the optimum (Wang and Song,
"Ckmeans.1d.dp", 2011). As the end of an interval moves right, its best start never moves left. So each row of the table can be
computed by divide and conquer in O(n log n), for all midpoints of one recursion level at the same time (Grønlund et al., "Fast exact
k-means, k-medians and Bregman divergence clustering in 1D", 2017).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.tensor import Array

_EXACT_CELLS = 1 << 20
"""Maximum size of the table: distinct values times clusters. A table of this size takes about a second."""
_MAX_ROUNDS = 200


class Clusters(NamedTuple):
    """The centroids, FP64 ascending, and True if they are optimal."""

    centroids: Array
    exact: bool


def kmeans(values: Array, weights: Array, count: int, *, grid: bool = False) -> Clusters:
    """At most ``count`` centroids that minimise the weighted sum of squared distances from ``values`` to their nearest centroid.

    ``values`` must be FP64, not empty, ascending and distinct. ``grid`` restricts centroids to integers. If there are more than 2^20 /
    ``count`` values, they are first grouped into 2^20 / ``count`` bins of equal width. Lloyd's algorithm then adapts the optimal
    centroids of the bins to the values. In this case, the result is not exact.
    """
    if len(values) <= count:
        return Clusters(values.copy(), True)
    bins = _EXACT_CELLS // count
    if len(values) <= bins:
        return Clusters(_optimum(values, weights, count, grid), True)
    edges = np.linspace(values[0], values[-1], bins + 1)[1:-1]
    number = np.searchsorted(edges, values)
    mass = np.bincount(number, weights, bins)
    means = np.bincount(number, weights * values, bins)[mass > 0] / mass[mass > 0]
    return Clusters(lloyd(values, weights, _optimum(means, mass[mass > 0], count, grid), grid=grid), False)


def lloyd(values: Array, weights: Array, centroids: Array, *, grid: bool = False) -> Array:
    """Move centroids to the means of their clusters until convergence. ``values`` must ascend. Empty clusters are dropped."""
    sums = _Sums(values, weights, grid)
    for _ in range(_MAX_ROUNDS):
        inner = np.searchsorted(values, (centroids[1:] + centroids[:-1]) / 2)
        bounds = np.unique(np.concatenate([[0], inner, [len(values)]]))
        moved = np.unique(sums.centres(bounds[:-1], bounds[1:]))
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def nearest(values: Array, centroids: Array) -> Array:
    """The index of the centroid nearest to each value. On a tie, the lower index is returned."""
    return np.asarray(np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values))


class _Sums:
    """Means and squared distances of any interval of sorted values, in constant time."""

    def __init__(self, values: Array, weights: Array, grid: bool) -> None:
        # Values are centred, so that differences of sums of squares keep their precision.
        self._shift = 0.0 if grid else float(np.average(values, weights=weights))
        self._grid = grid
        centred = values - self._shift
        moments = np.stack([weights, weights * centred, weights * centred**2])
        self._sums = np.concatenate([np.zeros((3, 1)), moments.cumsum(axis=1)], axis=1)

    def centres(self, starts: Array, stops: Array) -> Array:
        mass, first, _ = self._sums[:, stops] - self._sums[:, starts]
        return np.asarray(self._centre(mass, first) + self._shift)

    def costs(self, starts: Array, stops: Array) -> Array:
        mass, first, second = self._sums[:, stops] - self._sums[:, starts]
        centre = self._centre(mass, first)
        return np.asarray(np.maximum(second - 2 * centre * first + centre**2 * mass, 0))

    def _centre(self, mass: Array, first: Array) -> Array:
        return np.asarray(np.rint(first / mass) if self._grid else first / mass)


def _optimum(values: Array, weights: Array, count: int, grid: bool) -> Array:
    """The table of Wang and Song. ``costs[i]`` is the least cost of the first ``i`` values in the current number of clusters."""
    size, count = len(values), min(count, len(values))
    sums = _Sums(values, weights, grid)
    ends = np.arange(1, size + 1)
    costs = np.concatenate([[np.inf], sums.costs(np.zeros_like(ends), ends)])
    rows = []
    for clusters in range(2, count + 1):
        costs, starts = _next_row(costs, sums, clusters)
        rows.append(starts)
    bounds = [size]
    for starts in reversed(rows):
        bounds.append(int(starts[bounds[-1]]))
    cuts = np.array([0, *reversed(bounds)])
    return np.unique(sums.centres(cuts[:-1], cuts[1:]))


def _next_row(costs: Array, sums: _Sums, clusters: int) -> tuple[Array, Array]:
    """The least costs with one more cluster (``clusters`` in total), and the best starts of the last cluster."""
    size = len(costs) - 1
    found = np.full(size + 1, np.inf)
    starts = np.full(size + 1, clusters - 1, np.int32)
    step = 1 << size.bit_length()
    while step:
        ends = np.arange(step, size + 1, 2 * step)
        ends = ends[ends >= clusters]
        if len(ends):
            after = ends + step
            low = starts[ends - step]
            high = np.where(after <= size, np.minimum(starts[np.minimum(after, size)], ends - 1), ends - 1)
            found[ends], starts[ends] = _least(costs, sums, ends, low, high)
        step >>= 1
    return found, starts


def _least(costs: Array, sums: _Sums, ends: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """For each of ``ends``, the least cost over starts ``low`` to ``high`` of the last cluster, and the first such start."""
    widths = high - low + 1
    first = widths.cumsum() - widths
    begins = np.arange(int(widths.sum())) - np.repeat(first - low, widths)
    totals = costs[begins] + sums.costs(begins, np.repeat(ends, widths))
    least = np.minimum.reduceat(totals, first)
    hits = np.flatnonzero(totals == np.repeat(least, widths))
    return least, begins[hits[np.searchsorted(hits, first)]]
