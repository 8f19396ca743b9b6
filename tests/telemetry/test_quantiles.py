"""Quantiles of the last minute, compared with quantiles of the sorted values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.telemetry.quantiles import QUANTILES, WINDOW_NS, RecentDurations, RecentWindow

T = 10**15


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), st.sampled_from(QUANTILES))
def test_a_quantile_is_off_by_less_than_two_percent(durations: list[int], quantile: float) -> None:
    window = RecentWindow()
    for ns in durations:
        window.add(ns, 1, T)
    (found,) = window.quantiles([quantile], T)
    exact = sorted(durations)[math.ceil(quantile * len(durations)) - 1]
    assert found == pytest.approx(exact, rel=0.016)


def test_what_is_older_than_a_minute_is_forgotten_and_takes_no_room() -> None:
    window = RecentWindow()
    window.add(1000, 5, T)
    window.add(50, 2, T + WINDOW_NS // 2)
    assert window.quantiles([0.5], T + WINDOW_NS // 2) == pytest.approx([1000], rel=0.016)
    assert window.quantiles([0.5], T + WINDOW_NS + WINDOW_NS // 4) == [50]
    assert window.quantiles([0.5], T + 2 * WINDOW_NS) == [None]
    for later in range(1000):
        window.add(1, 1, T + later * WINDOW_NS)
    assert len(window.slices) <= 7


def test_a_batch_counts_once_for_each_of_its_requests() -> None:
    recent = RecentDurations()
    recent.executed([T, T + 10], T + 30, (1, 20, 3), T + 60)
    assert recent.request.quantiles([0.5, 1], T) == [50, 60]
    assert recent.queue.quantiles([0.5, 1], T) == [20, 30]
    assert [sum(each.values()) for each in recent.compute_infer.slices.values()] == [2]
    assert recent.compute_input.quantiles([1], T) == [1]
    assert recent.compute_output.quantiles([1], T) == [3]
    assert recent.cache_hit.quantiles([1], T) == [None]
