"""Histograms: exact counts for any batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidData
from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram, TensorStatistics

values = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True), max_size=60)


def filled(*arrays: np.ndarray) -> Histogram:
    histogram = Histogram()
    for array in arrays:
        histogram.update(array)
    return histogram


@given(values, st.lists(st.integers(0, 60), max_size=5))
def test_counts_do_not_depend_on_the_split_into_batches(elements: list[float], cuts: list[int]) -> None:
    array = np.array(elements, np.float32)
    whole, parts = filled(array), filled(*np.split(array, sorted(cuts)))
    np.testing.assert_array_equal(parts.counts, whole.counts)
    assert (parts.zeros, parts.count, parts.min, parts.max) == (whole.zeros, whole.count, whole.min, whole.max)
    assert parts.bin_width == whole.bin_width


@given(values)
def test_no_value_is_lost(elements: list[float]) -> None:
    histogram = filled(np.array(elements, np.float32))
    assert histogram.counts.sum() + histogram.zeros == histogram.count == len(elements)
    assert histogram.zeros == elements.count(0.0)
    assert (histogram.counts >= 0).all()


def test_counts_are_those_of_the_bins() -> None:
    array = np.random.default_rng(0).standard_normal((7, 5000)).astype(np.float32)
    histogram = filled(array[:3] / 1000, array, array * 37)
    everything = np.concatenate([array[:3].ravel() / np.float32(1000), array.ravel(), array.ravel() * np.float32(37)])
    bins = np.searchsorted(histogram.edges, everything, side="right") - 1
    np.testing.assert_array_equal(histogram.counts, np.bincount(bins, minlength=2 * BINS))
    assert histogram.edges[-1] == 256


def test_range_is_the_power_of_two_above_the_largest_magnitude() -> None:
    assert filled(np.array([-3.9], np.float32)).edges[-1] == 4
    assert filled(np.array([4.0], np.float32)).edges[-1] == 8
    assert filled(np.array([-3e38], np.float32)).edges[-1] == 2.0**128


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_float_and_any_shape(dtype: type) -> None:
    histogram = filled(np.array([[0.5, -0.25], [0.0, -0.0]], dtype).T)
    assert (histogram.count, histogram.zeros, histogram.min, histogram.max) == (4, 2, -0.25, 0.5)


def test_empty_arrays_change_nothing() -> None:
    histogram = filled(np.zeros((0, 3), np.float32))
    assert histogram.count == 0
    assert histogram.is_constant


def test_constant() -> None:
    assert filled(np.full(9, 2.5, np.float32)).is_constant
    assert not filled(np.array([2.5, 2.6], np.float32)).is_constant


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(InvalidData, match="NaN or infinity"):
        filled(np.array([0.0, bad, 1.0], np.float32))


def test_state_is_small() -> None:
    assert filled(np.ones(10, np.float32)).counts.nbytes <= 32 << 10


def test_centres_are_the_middles_of_the_bins_within_the_extremes() -> None:
    histogram = filled(np.array([-0.75, 0.5], np.float32))
    assert histogram.bin_width == 1 / 2048
    centres = histogram.centres
    assert (centres[0], centres[-1]) == (-0.75, 0.5)
    inside = (histogram.edges[:-1] > -0.75) & (histogram.edges[1:] < 0.5)
    np.testing.assert_array_equal(centres[inside], ((histogram.edges[:-1] + histogram.edges[1:]) / 2)[inside])


def test_large_arrays_are_counted_in_parts() -> None:
    array = np.random.default_rng(0).standard_normal((1 << 18) + 5).astype(np.float32)
    histogram = filled(array)
    assert histogram.count == histogram.counts.sum() == array.size
    assert (histogram.min, histogram.max) == (array.min(), array.max())


@pytest.mark.parametrize("value", [1e-45, 1e-38, 2.0**-110, 1e-30])
def test_the_smallest_numbers_are_counted_beside_zero(value: float) -> None:
    histogram = filled(np.array([value, -value, 0.0], np.float32))
    assert (histogram.zeros, histogram.count) == (1, 3)
    assert histogram.counts[:BINS].sum() == histogram.counts[BINS:].sum() == 1
    assert histogram.edges[-1] > value


def test_float64_keeps_its_precision_and_float16_its_small_numbers() -> None:
    found = Histogram()
    found.update(np.array([0.1, 0.3]))
    assert (found.min, found.max) == (0.1, 0.3)
    small = np.linspace(-0.01, 0.01, 999).astype(np.float16)
    half, single = Histogram(), Histogram()
    half.update(small)
    single.update(small.astype(np.float32))
    np.testing.assert_array_equal(half.counts, single.counts)


def test_a_tensor_may_be_clipped_unless_the_graph_forbids_it() -> None:
    assert TensorStatistics(Histogram()).clippable
    assert TensorStatistics(Histogram()).fixed is None
