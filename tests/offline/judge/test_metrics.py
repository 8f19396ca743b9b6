from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from scipy import stats

from penstock.offline.judge.metrics import matched_pairs, mean_interval, output_errors, paired_interval, sample_errors

SCORES = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 5], [9, 0, 0]])
RIGHT = np.array([0, 1, 2, 0])


def test_the_interval_is_that_of_agresti_and_min() -> None:
    # 100 pairs, 5 lost and 1 won. By hand: n = 102, b = 5.5, c = 1.5, centre 4 / 102,
    # spread 1.959964 * sqrt(7 - 16 / 102) / 102.
    before = np.repeat([True, True, False, False], [60, 5, 1, 34])
    after = np.repeat([True, False, True, False], [60, 5, 1, 34])
    interval = paired_interval(before, after)
    assert interval.value == pytest.approx(0.04)
    assert interval.low == pytest.approx(0.0392157 - 0.0502655, abs=1e-6)
    assert interval.high == pytest.approx(0.0392157 + 0.0502655, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 75, 797, 5000])
def test_without_differences_the_interval_is_that_of_clopper_and_pearson(count: int) -> None:
    hits = np.ones(count, bool)
    interval = paired_interval(hits, hits)
    exact = stats.binomtest(0, count).proportion_ci(0.95, "exact").high
    assert (interval.low, interval.value, interval.high) == pytest.approx((-exact, 0, exact))


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_a_loss_too_small_to_be_seen_is_within_the_interval(count: int) -> None:
    """Losses that a sample of this size often misses are covered at the confidence level of the interval."""
    rng, runs = np.random.default_rng(count), 4000
    for expected in (0.5, 1, 2, 3, 3.5):
        loss = expected / count
        lost = rng.binomial(count, loss, runs)
        intervals = {int(found): matched_pairs(count, float(found), float(found)) for found in np.unique(lost)}
        unseen = intervals.get(0)
        covered = np.mean([intervals[int(found)].low <= loss <= intervals[int(found)].high for found in lost])
        assert unseen is None or unseen.high >= loss
        assert covered >= 0.9


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_the_interval_is_antisymmetric_and_holds_the_loss(pairs: list[tuple[bool, bool]]) -> None:
    before, after = np.array(pairs).T
    loss, gain = paired_interval(before, after), paired_interval(after, before)
    assert loss.low <= loss.value <= loss.high
    assert (loss.low, loss.value, loss.high) == pytest.approx((-gain.high, -gain.value, -gain.low))


@given(
    stn.arrays(np.float32, (5, 3), elements=st.floats(width=32)),
    stn.arrays(np.float32, (5, 3), elements=st.floats(width=32)),
)
def test_errors_are_finite_whatever_the_answers(reference: np.ndarray, other: np.ndarray) -> None:
    errors = sample_errors({"y": reference}, {"y": other})
    assert ((errors >= 0) & (errors <= 1)).all()
    assert 0 <= output_errors({"y": reference}, {"y": other})["y"] <= 1e6
    assert output_errors({"y": reference}, {"y": reference})["y"] == 0


def test_errors_of_doubles_at_the_end_of_their_range() -> None:
    huge = np.full((2, 2), 1e308)
    assert output_errors({"y": huge}, {"y": -huge})["y"] <= 1e6
    assert output_errors({"y": np.zeros((2, 2))}, {"y": huge})["y"] == 1e6


def test_errors_count_all_outputs() -> None:
    reference = {"large": np.float32([[300.0]]), "small": np.float32([[4.0]])}
    other = {"large": np.float32([[300.0]]), "small": np.float32([[3.0]])}
    assert output_errors(reference, other) == pytest.approx({"large": 0.0, "small": 0.25})
    assert sample_errors(reference, other) == pytest.approx([0.25])


def test_rounding_beside_zeros_is_no_error() -> None:
    reference = {"y": np.zeros((2, 3), np.float32)}
    assert sample_errors(reference, {"y": np.full((2, 3), 1e-9, np.float32)}).max() < 0.01


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    found = mean_interval(np.float32(values))
    assert found.low <= found.value <= found.high
    assert np.isfinite([found.low, found.high]).all()
