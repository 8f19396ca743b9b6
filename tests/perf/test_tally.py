"""Tests of penstock.perf.tally."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.tally import LoadResult, Tally


def figures(tally: Tally, window_s: float = 2.0) -> LoadResult:
    tally.close_window(window_s)
    return LoadResult(**tally.figures())


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
def test_percentiles_are_exact_order_statistics(latencies: list[float]) -> None:
    tally = Tally()
    tally.count_from(0.0)
    tally.open_window(0.0)
    for latency in latencies:
        tally.answered(0.0, latency)
    result = figures(tally)
    ranked = sorted(latency * 1e3 for latency in latencies)
    for share, got in ((0.5, result.p50_ms), (0.95, result.p95_ms), (0.99, result.p99_ms)):
        assert got in ranked
        assert sum(value <= got for value in ranked) >= share * len(ranked) - 1e-6
        assert sum(value < got for value in ranked) <= share * len(ranked) + 1e-6
    assert result.max_ms == ranked[-1]
    assert result.throughput == len(latencies) / 2


def test_the_first_thing_said_of_each_kind_is_kept() -> None:
    tally = Tally()
    tally.failed("HTTP 400", 0.5, b"before")
    tally.count_from(1.0)
    tally.open_window(1.0)
    tally.failed("HTTP 400", 1.1, b"first" + b"\xff" * 5000)
    tally.failed("HTTP 400", 1.2, b"second")
    tally.failed("time-out", 1.3)
    (kind, said), *others = figures(tally).first_errors.items()
    assert (kind, said[:6], len(said), others) == ("HTTP 400", "first\ufffd", 1000, [])


def test_what_began_before_counts_for_throughput_only() -> None:
    tally = Tally()
    tally.answered(0.0, 0.5)  # all in the warm-up
    tally.failed("HTTP 503", 0.0)
    tally.count_from(1.0)
    tally.open_window(1.0)
    tally.answered(0.9, 1.5)  # answered in the window
    tally.answered(1.0, 1.2)
    tally.failed("HTTP 503", 1.1)
    tally.failed("time-out", 1.1)
    tally.failed("HTTP 503", 1.2)
    tally.close_window(3.0)
    tally.answered(2.9, 3.5)  # begun in the window, answered late
    result = LoadResult(**tally.figures())
    assert (result.requests, result.errors) == (5, 3)
    assert result.errors_by_kind == {"HTTP 503": 2, "time-out": 1}
    assert result.throughput == 1.0
    assert math.isclose(result.max_ms, 600)


def test_without_answers_there_are_no_latencies() -> None:
    tally = Tally()
    tally.open_window(0.0)
    result = figures(tally)
    assert math.isnan(result.p50_ms)
    assert math.isnan(result.max_ms)
    assert (result.throughput, result.requests) == (0, 0)
