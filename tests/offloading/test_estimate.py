"""The predicted time of a call."""

import random
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offloading.estimate import Estimate

_WARM_UP = (1000, 9.0)


def _of(calls: list[tuple[int, float]]) -> Estimate:
    """The estimate after a first call, which does not count, and ``calls``."""
    estimate = Estimate()
    for size, seconds in (_WARM_UP, *calls):
        estimate.add(size, seconds)
    return estimate


@given(
    st.floats(0, 1), st.floats(0, 1e-6), st.lists(st.integers(1, 10**7), min_size=1, max_size=14), st.integers(1, 10**7)
)
def test_a_line_is_found(start: float, slope: float, sizes: list[int], size: int) -> None:
    estimate = _of([(one, start + slope * one) for one in (1, 10**7, *sizes)])
    assert estimate.seconds(size) == pytest.approx(start + slope * size, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(0.01, 0.02), min_size=1, max_size=63))
def test_calls_of_one_size_take_their_mean_time_until_it_changes(times: list[float]) -> None:
    kept: list[float] = []
    for one in times:
        kept.append(one)
        for k in range(3, len(kept) - 2):
            newest, earlier = kept[-k:], kept[:-k]
            is_apart = min(newest) > max(earlier) or max(newest) < min(earlier)
            if is_apart and comb(len(kept), k) >= 50:
                kept = newest
                break
    assert _of([(1000, one) for one in times]).seconds(1000) == pytest.approx(sum(kept) / len(kept))


def test_slow_calls_count_as_often_as_they_happen() -> None:
    rng = random.Random(0)
    estimate = _of([(1000, 0.5 if rng.random() < 0.1 else 0.01) for _ in range(63)])
    assert estimate.seconds(1000) == pytest.approx(0.059, abs=0.03)


@pytest.mark.parametrize("after", [0.5, 0.001])
@pytest.mark.parametrize("calls", [5, 15, 63, 200])
def test_a_link_that_changes_is_noticed_within_three_calls(calls: int, after: float) -> None:
    assert _of([(1000, 0.01)] * calls + [(1000, after)] * 3).seconds(1000) == pytest.approx(after)


def test_the_first_call_counts_until_the_second() -> None:
    assert _of([]).seconds(1000) == 9
    assert _of([(1000, 0.01)]).seconds(1000) == 0.01


def test_nothing_is_known_before_the_first_call() -> None:
    assert Estimate().seconds(10) is None
