from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.offline.compress.sharing.kmeans import kmeans, lloyd, nearest
from penstock.tensor import Array


def _cost(values: Array, weights: Array, centroids: Array) -> float:
    return float((weights[:, np.newaxis] * (values[:, np.newaxis] - centroids[np.newaxis]) ** 2).min(axis=1).sum())


def _least(values: Array, weights: Array, count: int, grid: bool) -> float:
    """The minimum over all partitions of the sorted values into clusters."""
    count = min(count, len(values))
    best = np.inf
    for cuts in combinations(range(1, len(values)), count - 1):
        total = 0.0
        for start, stop in zip((0, *cuts), (*cuts, len(values)), strict=True):
            x, w = values[start:stop], weights[start:stop]
            mean = np.average(x, weights=w)
            centre = min((np.floor(mean), np.ceil(mean)), key=lambda c: (w * (x - c) ** 2).sum()) if grid else mean
            total += float((w * (x - centre) ** 2).sum())
        best = min(best, total)
    return best


@given(
    st.dictionaries(st.integers(-60, 60), st.integers(1, 9), min_size=1, max_size=10), st.integers(1, 6), st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_no_clustering_is_better(counts: dict[int, int], count: int, grid: bool) -> None:
    values = np.array(sorted(counts), float) / (1 if grid else 8)
    weights = np.array([counts[value] for value in sorted(counts)], float)
    found = kmeans(values, weights, count, grid=grid)
    assert found.exact
    assert 1 <= len(found.centroids) <= count
    assert (np.diff(found.centroids) > 0).all()
    assert not grid or (found.centroids == np.rint(found.centroids)).all()
    least = _least(values, weights, count, grid)
    # Sums of squares of a dozen small numbers keep some 14 digits.
    assert _cost(values, weights, found.centroids) <= least + 1e-9 * (1 + least)


def test_it_beats_lloyd_from_a_linear_start() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=3000))
    ones = np.ones(len(values))
    exact = _cost(values, ones, kmeans(values, ones, 16).centroids)
    linear = np.linspace(values[0], values[-1], 16)  # the start that the paper found best, §3.2
    settled = lloyd(values, ones, linear)
    assert exact < _cost(values, ones, settled) < _cost(values, ones, linear)
    assert np.array_equal(lloyd(values, ones, settled), settled)


def test_far_from_zero_no_digits_are_lost() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=500))
    near, far = (kmeans(values + shift, np.ones(500), 8).centroids - shift for shift in (0.0, 1e6))
    assert far == pytest.approx(near, abs=1e-6)


def test_too_many_values_are_binned_and_it_says_so() -> None:
    values = np.sort(np.random.default_rng(0).standard_t(3, size=20_000))
    ones = np.ones(len(values))
    found = kmeans(values, ones, 256)
    assert not found.exact
    assert len(found.centroids) == 256
    settled = lloyd(values, ones, np.linspace(values[0], values[-1], 256))
    chosen = _cost_sorted(values, found.centroids)
    assert chosen < _cost_sorted(values, settled)
    assert np.array_equal(kmeans(values, ones, 256).centroids, found.centroids)


def _cost_sorted(values: Array, centroids: Array) -> float:
    return float(((values - centroids[nearest(values, centroids)]) ** 2).sum())


def test_nearest_is_nearest() -> None:
    rng = np.random.default_rng(0)
    values, centroids = rng.normal(size=200), np.sort(rng.normal(size=9))
    found = nearest(values, centroids)
    assert np.array_equal(found, np.abs(values[:, np.newaxis] - centroids).argmin(axis=1))
    assert nearest(values, centroids[:1]).tolist() == [0] * 200
