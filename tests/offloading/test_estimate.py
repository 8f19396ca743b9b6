"""The predicted time of a call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offloading.estimate import Estimate


def _of(calls: list[tuple[int, float]]) -> Estimate:
    estimate = Estimate()
    for size, seconds in calls:
        estimate.add(size, seconds)
    return estimate


@given(
    st.floats(0, 1), st.floats(0, 1e-6), st.lists(st.integers(1, 10**7), min_size=2, max_size=15), st.integers(1, 10**7)
)
def test_a_line_is_found(start: float, slope: float, sizes: list[int], size: int) -> None:
    estimate = _of([(one, start + slope * one) for one in (1, *sizes[1:])])
    if len({1, *sizes[1:]}) > 1 and max(1, *sizes[1:]) > 1.25:
        assert estimate.seconds(size) == pytest.approx(start + slope * size, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(0.01, 0.011), min_size=5, max_size=5), st.floats(1, 100))
def test_one_slow_call_changes_nothing(times: list[float], slow: float) -> None:
    assert _of([(1000, one) for one in (*times[:2], slow, *times[2:4])]).seconds(1000) <= 0.011  # type: ignore[operator]


def test_a_link_that_slows_down_is_noticed_within_three_calls() -> None:
    estimate = _of([(1000, 0.01)] * 15 + [(1000, 0.5)] * 3)
    assert estimate.seconds(1000) == 0.5


def test_nothing_is_known_before_the_first_call() -> None:
    assert Estimate().seconds(10) is None
