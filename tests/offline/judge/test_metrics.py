from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from scipy import stats

from penstock.offline.judge.metrics import (
    deviations,
    matched_pairs,
    mean_interval,
    output_errors,
    sample_errors,
    share_of_few,
)

SCORES = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 5], [9, 0, 0]])
RIGHT = np.array([0, 1, 2, 0])


def test_the_interval_is_that_of_agresti_and_min() -> None:
    # 100 pairs, 5 lost and 1 won. By hand: n = 102, b = 5.5, c = 1.5, centre 4 / 102,
    # spread 1.959964 * sqrt(7 - 16 / 102) / 102.
    interval = matched_pairs(100, 4, 6)
    assert interval.value == pytest.approx(0.04)
    assert interval.low == pytest.approx(0.0392157 - 0.0502655, abs=1e-6)
    assert interval.high == pytest.approx(0.0392157 + 0.0502655, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 75, 797, 5000])
def test_without_differences_the_interval_is_that_of_clopper_and_pearson(count: int) -> None:
    interval = matched_pairs(count, 0, 0)
    exact = stats.binomtest(0, count).proportion_ci(0.95, "exact").high
    assert (interval.low, interval.value, interval.high) == pytest.approx((-exact, 0, exact))


def test_rows_differ_relative_to_their_spread() -> None:
    want = np.float32([[100, 0], [102, 0], [98, 0], [100, 0]])
    got = want + np.float32([0, 1])
    assert deviations(want, got) == pytest.approx([(3 / 8) ** 0.5] * 4, rel=1e-6)
    assert deviations(want[..., None], got[..., None]) == pytest.approx([1 / 100.02] * 4, rel=1e-4)
    assert deviations(np.array([1, 2, 3]), np.array([1, 9, 3])).tolist() == [0, 1, 0]
    assert deviations(np.zeros((3, 0), np.int64), np.zeros((3, 0), np.int64)).tolist() == [0, 0, 0]
    assert deviations(want, np.where(want > 101, np.nan, want))[1] >= 1
    constant = np.full((3, 2), 5, np.float32)
    assert deviations(constant, constant * np.float32(1 + 1e-6)).max() < 0.02


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


def test_few_rows_make_up_their_share_of_the_spread() -> None:
    rows = np.zeros((40, 2), np.float32)
    assert share_of_few(rows) == 0
    rows[0], rows[1], rows[2] = 3, -3, 1
    assert share_of_few(rows) == pytest.approx(18 / (19 - 1 / 40), rel=0.01)
    assert share_of_few(rows[:1]) == 0


def test_rounding_beside_zeros_is_no_error() -> None:
    reference = {"y": np.zeros((2, 3), np.float32)}
    assert sample_errors(reference, {"y": np.full((2, 3), 1e-9, np.float32)}).max() < 0.01


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    found = mean_interval(np.float32(values))
    assert found.low <= found.value <= found.high
    assert np.isfinite([found.low, found.high]).all()
