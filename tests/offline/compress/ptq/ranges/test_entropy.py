"""KL-entropy: the closed form compared with the definition, and the effect on outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization.calibrate import HistogramCollector

from penstock.offline.compress.ptq.ranges import entropy
from penstock.offline.compress.ptq.ranges.entropy import best_window, divergences, entropy_range
from penstock.offline.compress.ptq.ranges.histogram import BINS, Histogram
from penstock.tensor import Array


def divergence_by_definition(counts: Array, low: int, high: int, levels: int) -> float:
    """The plain double loop."""
    reference = counts[low:high].astype(float)
    kept = reference.copy()
    reference[0] += counts[:low].sum()
    reference[-1] += counts[high:].sum()
    levels = min(levels, high - low)
    spread = np.zeros(high - low)
    for level in range(levels):
        start, stop = (math.floor((high - low) * k / levels + 0.5) for k in (level, level + 1))
        filled = [b for b in range(start, stop) if reference[b] > 0]
        for b in filled:
            spread[b] = kept[start:stop].sum() / len(filled)
    reference /= reference.sum()
    spread /= spread.sum()
    result = 0.0
    for p, q in zip(reference, spread, strict=True):
        if p > 0:
            if q == 0:
                return math.inf
            result += p * math.log(p / q)
    return result


def histogram(*arrays: Array) -> Histogram:
    found = Histogram()
    for array in arrays:
        found.update(array.astype(np.float32))
    return found


@given(st.integers(0, 2**32), st.sampled_from([128, 256]), st.floats(0.02, 1.0), st.booleans())
def test_closed_form_is_the_definition(seed: int, levels: int, density: float, two_sided: bool) -> None:
    rng = np.random.default_rng(seed)
    bins = 600
    counts = rng.geometric(1e-3, bins) * (rng.random(bins) < density)
    counts[bins // 2] = 10 * counts.sum() + 1
    highs = rng.integers(450, bins + 1, 6)
    lows = rng.integers(0, 150, 6) * two_sided
    fast = divergences(counts, lows, highs, levels)
    slow = [divergence_by_definition(counts, low, high, levels) for low, high in zip(lows, highs, strict=True)]
    np.testing.assert_allclose(fast, slow, rtol=1e-12, atol=1e-12)


def test_fewer_bins_than_levels() -> None:
    counts = np.random.default_rng(0).integers(0, 9, 300)
    counts[50] = 10_000
    highs = np.arange(128, 301)
    fast = divergences(counts, np.zeros_like(highs), highs, 256)
    slow = [divergence_by_definition(counts, 0, high, 256) for high in highs]
    np.testing.assert_allclose(fast, slow, rtol=1e-12, atol=1e-12)


def test_outliers_beside_an_empty_level_are_infinitely_far() -> None:
    counts = np.zeros(400, np.int64)
    counts[:100] = 5
    counts[399] = 1
    scores = divergences(counts, np.array([0, 0]), np.array([200, 400]), 128)
    assert np.isinf(scores[0])
    assert np.isfinite(scores[1])


def test_clips_rare_outliers() -> None:
    rng = np.random.default_rng(0)
    body = np.maximum(rng.standard_normal(1_000_000), 0)
    outliers = rng.uniform(30, 39.7, 50)
    found = entropy_range(histogram(body, outliers))
    assert found.low == 0
    assert 3 < found.high < 6


def test_default_of_onnxruntime_does_not_clip_them() -> None:
    # 128 bins and 128 levels leave one candidate: everything. The reason for an implementation of our own.
    rng = np.random.default_rng(0)
    array = np.maximum(rng.standard_normal((1, 100_000)), 0).astype(np.float32)
    array[0, :5] = 39.7
    collector = HistogramCollector(
        method="entropy", symmetric=False, num_bins=128, num_quantized_bins=128, percentile=99.999, scenario="same"
    )
    collector.collect({"x": [array]})
    _, high = collector.compute_collection_result()["x"][:2]
    assert high == pytest.approx(39.7, rel=0.02)
    assert entropy_range(histogram(array)).high < 10


def test_tensors_without_values_near_zero_keep_most_of_them() -> None:
    averages = np.random.default_rng(0).uniform(0.3, 3.8, 1000)
    assert entropy_range(histogram(averages)).high > 3


def test_zeros_do_not_move_the_threshold() -> None:
    body = np.abs(np.random.default_rng(0).standard_normal(50_000))
    assert entropy_range(histogram(body)) == entropy_range(histogram(body, np.zeros(1_000_000)))


def test_negative_tensors_mirror_positive_ones() -> None:
    body = np.abs(np.random.default_rng(0).standard_cauchy(20_000))
    positive, negative = entropy_range(histogram(body)), entropy_range(histogram(-body))
    assert negative.high == 0
    assert negative.low == pytest.approx(-positive.high, rel=0.01)


def test_each_end_of_a_two_sided_tensor_is_searched() -> None:
    rng = np.random.default_rng(0)
    body = rng.normal(0.4, 0.3, 500_000)
    found = entropy_range(histogram(body, np.array([-30.0, -29.0, 25.0])))
    assert -3 < found.low <= -0.5
    assert 1.4 <= found.high < 5


def test_window_is_near_the_best_of_all() -> None:
    rng = np.random.default_rng(1)
    array = np.concatenate([rng.normal(0, 0.02, 4000), rng.normal(0.05, 0.01, 2000), [0.999, -0.2]])
    found = histogram(array)
    counts = found.counts
    first, last = np.flatnonzero(counts)[[0, -1]] + [0, 1]
    lows, highs = np.meshgrid(np.arange(first, BINS, 16), np.append(np.arange(BINS + 1, last, 16), last))
    scores = divergences(counts, lows.ravel(), highs.ravel(), 256)
    low, high = best_window(counts)
    score = divergences(counts, np.array([low]), np.array([high]), 256)[0]
    assert score <= scores.min() * 1.05


def test_narrow_tensors_are_not_clipped() -> None:
    # All mass in fewer bins than the narrowest window: nothing to search.
    found = entropy_range(histogram(np.array([1.9, 1e-5]), np.full(100, 1e-4)))
    assert found.high <= np.float32(1.9)
    tight = entropy_range(histogram(np.array([-0.01, 0.01, 1e-3])))
    assert tight.low == pytest.approx(-0.01)
    assert tight.high == pytest.approx(0.01)


def test_all_mass_but_a_tenth_may_be_outside() -> None:
    counts = np.full(1000, 10)
    scores = divergences(counts, 0, np.array([899, 900, 1000]), 256)
    assert np.isinf(scores[0])
    assert np.isfinite(scores[1:]).all()


def test_the_narrowest_window_has_128_bins() -> None:
    counts = np.append(np.full(130, 10_000), np.ones(100, np.int64))
    assert np.isinf(divergences(counts, 0, np.array([127]), 128))[0]
    few = np.append(np.full(126, 10_000), [1, 1])
    assert np.isfinite(divergences(few, 0, np.array([128]), 128))[0]


def test_the_smallest_numbers_are_not_clipped() -> None:
    """They are in fewer bins than the narrowest window, so that there is nothing to search."""
    for low, high in ((0.0, 1e-36), (-1e-36, 0.0), (-1e-36, 2e-36)):
        found = entropy_range(histogram(np.array([low, high, low / 2, high / 2])))
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_threshold_of_one_side_is_the_best_of_all_windows(sign: int) -> None:
    body = np.abs(np.random.default_rng(0).standard_normal(30_000))
    found = histogram(sign * np.append(body, [9.0, 11.0]))
    counts = found.counts[BINS:] if sign > 0 else found.counts[BINS - 1 :: -1]
    highs = np.arange(128, np.flatnonzero(counts)[-1] + 2)
    best = highs[np.argmin(divergences(counts, 0, highs, 256))]
    end = entropy_range(found).high if sign > 0 else -entropy_range(found).low
    assert end == pytest.approx((best + 0.5) * found.bin_width)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 4), (5, 68), (0, 63), (0, 640), (100, 1003)])
def test_a_scan_finds_the_lowest_place_of_a_valley(start: int, stop: int) -> None:
    for lowest in range(start, stop + 1):
        found = entropy._scan(lambda places, lowest=lowest: np.abs(places - lowest), stop, start, stop)
        assert found == lowest


def test_a_window_needs_nine_tenths_of_the_mass_wherever_the_rest_is() -> None:
    counts = np.full(600, 10)
    counts[-1] = 1500  # a fifth
    assert divergences(counts, 0, np.array([599]), 256) == math.inf
    counts[-1] = 600
    assert divergences(counts, 0, np.array([599]), 256) < math.inf


def test_values_next_to_a_power_of_two_are_in_the_outermost_bins() -> None:
    values = np.linspace(-0.9999, 0.9999, 100_000)
    found = entropy_range(histogram(values))
    assert found.low == pytest.approx(-0.9999, abs=0.01)
    assert found.high == pytest.approx(0.9999, abs=0.01)


@pytest.mark.parametrize("least", [-0.5, -20, -300])
def test_a_side_may_have_few_bins(least: float) -> None:
    width = 1 / BINS
    values = np.random.default_rng(0).uniform(least * width, 0.9, 20_000)
    found = entropy_range(histogram(values))
    assert least * width <= found.low < 0
    assert 0.85 < found.high <= 0.9


def test_negative_tensors_with_zeros_mirror_positive_ones() -> None:
    body = np.append(np.abs(np.random.default_rng(0).standard_cauchy(20_000)), np.zeros(500))
    positive, negative = entropy_range(histogram(body)), entropy_range(histogram(-body))
    assert (negative.low, negative.high) == (pytest.approx(-positive.high, rel=2e-3), 0.0)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_tensor_of_few_bins_keeps_its_extreme(share: float) -> None:
    """Wherever in its bin that is."""
    width = 1 / BINS
    found = histogram(np.append(np.linspace(0.1, 99, 1000), 100 + share) * width)
    found._cover(0.75)
    assert found.bin_width == width
    assert entropy_range(found).high == found.max
