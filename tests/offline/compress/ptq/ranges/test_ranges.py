"""Ranges: each method has its documented properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offline.compress.ptq.ranges.histogram import Histogram, Range, TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, percentile_range, ranges
from penstock.offline.compress.ptq.ranges.ranges import squared_error as error_of
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

UNSIGNED = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
SIGNED = IntegerScheme(DataType.INT8, DataType.INT8, False, "test")
SCHEMES = [UNSIGNED, SIGNED]


def choose(array: Array, method: RangeMethod, scheme: IntegerScheme = UNSIGNED, **options: float) -> Range:
    histogram = Histogram()
    histogram.update(array.astype(np.float32))
    return ranges({"x": TensorStatistics(histogram)}, method, scheme, **options)["x"]


def squared_error(array: Array, low: float, high: float, scheme: IntegerScheme) -> float:
    smallest, largest = scheme.activation_limits
    scale = (high - low) / 255
    zero = round(smallest - low / scale)
    integers = np.clip(np.round(array / scale) + zero, smallest, largest)
    return float((((integers - zero) * scale - array) ** 2).mean())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", list(RangeMethod))
@given(elements=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_ranges_are_legal(method: RangeMethod, scheme: IntegerScheme, elements: list[float]) -> None:
    array = np.array(elements)
    found = choose(array, method, scheme)
    assert found.low <= 0 <= found.high
    assert min(array.min(), 0) <= found.low
    assert found.high <= max(array.max(), 0)
    if not array.any():
        assert found == Range(0, 0)


def test_min_max() -> None:
    assert choose(np.array([-1.5, 3.0]), RangeMethod.MIN_MAX) == Range(-1.5, 3)
    assert choose(np.array([1.5, 3.0]), RangeMethod.MIN_MAX) == Range(0, 3)


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_cuts_both_ends(percentile: float) -> None:
    array = np.random.default_rng(0).normal(1, 2, 200_000)
    found = choose(array, RangeMethod.PERCENTILE, percentile=percentile)
    share = (1 - percentile / 100) / 2
    low, high = np.quantile(array, [share, 1 - share])
    assert found.low == pytest.approx(low, abs=0.02)
    assert found.high == pytest.approx(high, abs=0.02)


def test_percentile_counts_zeros() -> None:
    array = np.concatenate([np.zeros(9000), np.linspace(0.001, 1, 1000)])
    assert choose(array, RangeMethod.PERCENTILE, percentile=98.0).high == pytest.approx(0.9, abs=0.002)
    assert choose(array, RangeMethod.PERCENTILE, percentile=100.0).high == pytest.approx(1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tensor", ["normal", "relu", "laplace", "gelu", "outliers"])
def test_mse_is_near_the_least_of_brute_force(tensor: str, scheme: IntegerScheme) -> None:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(20_000)
    array = {
        "normal": normal,
        "relu": np.maximum(normal, 0),
        "laplace": rng.laplace(size=20_000),
        "gelu": normal / (1 + np.exp(-1.702 * normal)),
        "outliers": np.append(normal, [30.0, -25.0]),
    }[tensor]
    lowest, highest = min(array.min(), 0.0), max(array.max(), 0.0)
    shares = np.linspace(0.05, 1, 39)
    lows = shares if lowest < 0 else [None]
    least = min(
        squared_error(array, lowest * (high if low is None else low), highest * high, scheme)
        for high in shares
        for low in lows
    )
    found = choose(array, RangeMethod.MSE, scheme)
    assert squared_error(array, found.low, found.high, scheme) <= least * 1.05


def test_methods_clip_what_they_should() -> None:
    rng = np.random.default_rng(0)
    array = np.append(np.maximum(rng.standard_normal(1_000_000), 0), 39.7)
    high = {method: choose(array, method).high for method in RangeMethod}
    assert high[RangeMethod.MIN_MAX] == pytest.approx(39.7)
    assert high[RangeMethod.PERCENTILE] < 5
    assert high[RangeMethod.ENTROPY] < 6
    assert high[RangeMethod.MSE] < 39.7


def test_what_the_graph_says_comes_first() -> None:
    histogram = Histogram()
    histogram.update(np.append(np.random.default_rng(0).standard_normal(100_000), 50).astype(np.float32))
    statistics = {
        "scores": TensorStatistics(histogram, clippable=False),
        "shares": TensorStatistics(Histogram(), fixed=Range(0, 1)),
        "never run": TensorStatistics(Histogram()),
    }
    found = ranges(statistics, RangeMethod.ENTROPY, UNSIGNED)
    assert found == {"scores": Range(histogram.min, 50), "shares": Range(0, 1)}


@pytest.mark.parametrize("method", list(RangeMethod))
def test_constant_tensors_keep_their_value(method: RangeMethod) -> None:
    assert choose(np.full(10, 2.5), method) == Range(0, 2.5)
    assert choose(np.full(10, -2.5), method) == Range(-2.5, 0)


def at_centres(numbers: Array) -> tuple[Array, Histogram]:
    """Values in the middle of bins near ``numbers`` below 1, and their histogram."""
    array = ((np.floor(np.asarray(numbers) * 2048) + 0.5) / 2048).astype(np.float32)
    histogram = Histogram()
    histogram.update(array)
    return array, histogram


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_squared_error_is_that_of_the_rounded_values(scheme: IntegerScheme) -> None:
    array, histogram = at_centres(np.random.default_rng(0).normal(0, 0.2, 3000).clip(-0.99, 0.99))
    lows, highs = np.array([-0.5, -0.1, 0.0]), np.array([0.9, 0.3, 0.4])
    want = [array.size * squared_error(array, *ends, scheme) for ends in zip(lows, highs, strict=True)]
    np.testing.assert_allclose(error_of(histogram, scheme)(lows, highs), want, rtol=1e-6)


def test_mse_of_one_side_is_the_least_of_all() -> None:
    for sign in (1, -1):
        rng = np.random.default_rng(0)
        array, histogram = at_centres(sign * np.append(np.abs(rng.normal(0, 0.1, 3000)), 0.99).clip(0, 0.99))
        found = ranges({"x": TensorStatistics(histogram)}, RangeMethod.MSE, UNSIGNED)["x"]
        shares = np.linspace(0.001, 1, 4000)
        widest = float(array.max() if sign > 0 else array.min())
        ends = (0 * shares, widest * shares) if sign > 0 else (widest * shares, 0 * shares)
        least = error_of(histogram, UNSIGNED)(*ends).min()
        own = error_of(histogram, UNSIGNED)(np.array([found.low]), np.array([found.high]))[0]
        assert own <= 1.002 * least


def test_percentiles_interpolate_inside_the_bins() -> None:
    array, histogram = at_centres(np.arange(2000) / 2048)
    for percentile in (90.0, 50.0):
        cut = (1 - percentile / 100) / 2 * array.size
        assert percentile_range(histogram, percentile) == Range(0.0, pytest.approx((array.size - cut) / 2048))
    mirrored = at_centres(-np.arange(1, 2001) / 2048)[1]
    assert percentile_range(mirrored, 90.0) == Range(pytest.approx(-(2000 - 100) / 2048), 0.0)


def test_the_usual_percentile_is_99_99() -> None:
    _, histogram = at_centres(np.random.default_rng(0).normal(0, 0.2, 100_000).clip(-0.99, 0.99))
    statistics = {"x": TensorStatistics(histogram)}
    usual, given = (ranges(statistics, RangeMethod.PERCENTILE, UNSIGNED, *rest)["x"] for rest in ((), (99.99,)))
    assert usual == given == percentile_range(histogram, 99.99)


@pytest.mark.parametrize("zeros", [0, 1000, 20_000, 90_000])
@pytest.mark.parametrize("centre", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("percentile", [50, 80, 99])
def test_percentiles_are_those_of_the_values_and_the_zeros(zeros: int, centre: float, percentile: float) -> None:
    body = np.random.default_rng(0).normal(centre, 0.3, 100_000 - zeros).clip(-1.9, 1.9)
    array = np.append(body, np.zeros(zeros)).astype(np.float32)
    histogram = Histogram()
    histogram.update(array)
    found = percentile_range(histogram, percentile)
    share = (1 - percentile / 100) / 2
    low, high = np.quantile(array, [share, 1 - share])
    assert found.low == pytest.approx(min(low, 0), abs=2 * histogram.bin_width)
    assert found.high == pytest.approx(max(high, 0), abs=2 * histogram.bin_width)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_mse_shrinks_each_end_by_itself(scheme: IntegerScheme, sign: int) -> None:
    """One side is dense up to its end, the other has outliers."""
    rng = np.random.default_rng(0)
    array = sign * np.concatenate([rng.uniform(-1, 0, 50_000), np.abs(rng.normal(0, 0.3, 50_000)), [9.0, 10.0]])
    found = choose(array, RangeMethod.MSE, scheme)
    ends = (found.low, found.high) if sign > 0 else (-found.high, -found.low)
    assert ends[0] == pytest.approx(-1, abs=0.05)
    assert ends[1] < 9.5


def test_percentiles_of_few_values_are_inside_their_bins() -> None:
    """A quarter of the way beyond the middle, on both sides of a step of zeros and far from it."""
    histogram = Histogram()
    width = 1 / 2048
    histogram.update(np.array([-0.75 - width / 2, -width / 2, 0.0, 0.0, width / 2, 0.75 + width / 2]))
    assert histogram.bin_width == width
    for values, centre in ((0, 0.75 + width / 2), (1, width / 2)):
        found = percentile_range(histogram, 100 * (1 - 2 * (values + 0.75) / 6))
        assert (found.low, found.high) == (pytest.approx(-centre + width / 4), pytest.approx(centre - width / 4))
    assert percentile_range(histogram, 10) == Range(0.0, 0.0)
