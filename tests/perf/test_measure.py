from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import models
from penstock.clock import ManualClock
from penstock.engines.registry import get_engine
from penstock.perf.measure import FEWEST_CALLS, ConditionsWatch, Timings, feed, interleave, repeat_rows, speedup


def taking(clock: ManualClock, seconds: float, calls: list[str] | None = None, name: str = "") -> Callable[[], None]:
    """A run that takes ``seconds`` on ``clock`` and writes its name into ``calls``."""

    def run() -> None:
        clock.advance(seconds)
        if calls is not None:
            calls.append(name)

    return run


def test_every_way_is_timed_by_the_clock() -> None:
    clock = ManualClock()
    timings = interleave({"slow": taking(clock, 0.010), "quick": taking(clock, 0.005)}, budget_s=1.0, clock=clock)
    assert timings["slow"].p50_ms == pytest.approx(10)
    assert timings["quick"].p50_ms == pytest.approx(5)
    assert timings["slow"].p99_ms == pytest.approx(10)


def test_the_budget_bounds_the_rounds() -> None:
    clock = ManualClock()
    timings = interleave({"a": taking(clock, 0.010), "b": taking(clock, 0.010)}, budget_s=1.0, clock=clock)
    assert clock.now() == pytest.approx(1.0, abs=0.1)
    assert 40 <= len(timings["a"].seconds) <= 50


def test_a_budget_of_nothing_still_gives_the_fewest_calls() -> None:
    clock, calls = ManualClock(), []
    timings = interleave({"a": taking(clock, 3.0, calls)}, budget_s=0.0, clock=clock)
    assert timings["a"].seconds.shape == (7, 1)
    assert len(calls) == FEWEST_CALLS


def noisy(clock: ManualClock, seconds: float, noise: float, seed: int) -> Callable[[], None]:
    rng = np.random.default_rng(seed)
    return lambda: clock.advance(seconds * rng.lognormal(0, noise))


def test_timing_ends_once_the_ratios_are_known() -> None:
    rounds, kept = [], []
    for noise in (0.01, 0.1):
        clock = ManualClock()
        runs = {"a": noisy(clock, 0.0002, noise, 1), "b": noisy(clock, 0.0001, noise, 2)}
        timings = interleave(runs, budget_s=1000.0, clock=clock, precision=0.01)
        found = speedup(timings["a"], timings["b"])
        assert found.low < 2 < found.high
        assert (found.high - found.low) / 2 < 1.5 * 0.01 * found.value
        rounds.append(len(timings["a"].seconds))
        kept.append(timings["b"].seconds.size)
    assert rounds[0] < rounds[1] < 400
    assert min(kept) >= 300


def test_a_p99_has_its_calls_even_where_the_ratio_is_known() -> None:
    clock = ManualClock()
    runs = {"a": taking(clock, 0.010), "b": taking(clock, 0.005)}
    assert len(interleave(runs, budget_s=1000.0, clock=clock, precision=0.5)["a"].seconds) >= 300


def test_what_is_not_precise_enough_takes_the_budget() -> None:
    clock = ManualClock()
    runs = {"a": noisy(clock, 0.002, 0.5, 1), "b": noisy(clock, 0.001, 0.5, 2)}
    interleave(runs, budget_s=0.5, clock=clock, precision=0.001)
    assert clock.now() == pytest.approx(0.5, abs=0.1)


def test_ways_alternate_in_changing_order() -> None:
    clock, calls = ManualClock(), []
    runs = {name: taking(clock, 0.003, calls, name) for name in "abc"}
    interleave(runs, budget_s=1.0, clock=clock)
    rounds = ["".join(calls[start : start + 3]) for start in range(9, len(calls), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) == 6


def test_short_calls_come_in_bursts_without_their_first() -> None:
    clock = ManualClock()
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        clock.advance(0.0001)

    timings = interleave({"short": run}, budget_s=0.0, clock=clock)
    rounds, kept = timings["short"].seconds.shape
    assert rounds == 7
    assert kept == 19
    assert calls == 3 + 10 * (kept + 1)


def test_the_first_rounds_are_dropped() -> None:
    clock, calls = ManualClock(), 0

    def warming_up() -> None:
        nonlocal calls
        calls += 1
        clock.advance(0.5 if calls <= 6 else 0.01)

    timings = interleave({"a": warming_up}, budget_s=0.0, clock=clock)
    assert timings["a"].p99_ms == pytest.approx(10)


def test_collection_is_off_while_timing_and_restored_after_a_failure() -> None:
    seen = []

    def failing() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 5:
            raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError, match="the model failed"):
        interleave({"a": failing}, budget_s=0.0)
    assert gc.isenabled()
    assert seen[-1] is False


@pytest.mark.parametrize("ratio", [1.0, 1.3, 4.0])
def test_the_interval_holds_the_true_ratio_under_shared_disturbances(ratio: float) -> None:
    held, narrow = 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        # A neighbour slows whole rounds down, both ways alike; every call has jitter of its own.
        neighbour = 1 + 2 * (rng.random((60, 1)) < 0.3) * rng.random((60, 1))
        jitter = rng.lognormal(0, 0.05, (2, 60, 5))
        base, other = Timings(ratio * neighbour * jitter[0]), Timings(neighbour * jitter[1])
        interval = speedup(base, other)
        assert interval.low <= interval.value <= interval.high
        held += interval.low <= ratio <= interval.high
        narrow += interval.high / interval.low < 1.15
    assert held >= 17
    assert narrow >= 17


def test_speedup_is_repeatable_and_exact_without_noise() -> None:
    base, other = Timings(np.full((10, 3), 0.04)), Timings(np.full((10, 5), 0.01))
    interval = speedup(base, other)
    assert (interval.low, interval.value, interval.high) == pytest.approx((4, 4, 4))
    noisy = Timings(np.random.default_rng(1).random((10, 3)) + 1)
    assert speedup(noisy, other) == speedup(noisy, other)


def test_higher_confidence_is_a_wider_interval() -> None:
    rng = np.random.default_rng(0)
    base, other = Timings(rng.random((30, 3)) + 1), Timings(rng.random((30, 3)) + 1)
    narrow, wide = speedup(base, other, confidence=0.5), speedup(base, other, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_percentiles_are_over_all_calls_in_milliseconds() -> None:
    timings = Timings(np.arange(1, 101, dtype=float).reshape(10, 10) / 1e3)
    assert timings.p50_ms == pytest.approx(50.5)
    assert timings.p99_ms == pytest.approx(99.01)


def proc(folder: Path, steal: int = 0, idle: int = 0, load: float = 0.5) -> Path:
    (folder / "stat").write_text(f"cpu  100 0 100 {1000 + idle} 0 0 0 {steal} 50 0\ncpu0 1 2 3\n")
    (folder / "loadavg").write_text(f"{load} 0.1 0.1 1/100 4242\n")
    return folder


def test_a_quiet_machine_is_clean(tmp_path: Path) -> None:
    watch = ConditionsWatch(2, proc(tmp_path))
    proc(tmp_path, steal=1, idle=999, load=2.5)
    conditions = watch.finish()
    assert (conditions.load_before, conditions.load_after) == (0.5, 2.5)
    assert conditions.steal_percent == pytest.approx(0.1)
    assert not conditions.dirty


def test_stolen_time_is_dirty(tmp_path: Path) -> None:
    watch = ConditionsWatch(2, proc(tmp_path))
    proc(tmp_path, steal=10, idle=90)
    conditions = watch.finish()
    assert conditions.steal_percent == pytest.approx(10)
    assert conditions.dirty


@pytest.mark.parametrize(("load", "dirty"), [(3.0, False), (3.1, True)])
def test_load_from_others_before_the_start_is_dirty(tmp_path: Path, load: float, dirty: bool) -> None:
    assert ConditionsWatch(2, proc(tmp_path, load=load)).finish().dirty is dirty


@pytest.mark.parametrize("text", ["", "cpu\n", "intr 1 2\n", "cpu a b c\n", "cpu  1 2 3\n"])
def test_a_kernel_that_does_not_tell_counts_as_no_steal(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert ConditionsWatch(64, tmp_path).finish().steal_percent == 0


def test_without_proc_the_conditions_are_read_from_the_system(tmp_path: Path) -> None:
    conditions = ConditionsWatch(1, tmp_path / "nowhere").finish()
    assert conditions.steal_percent == 0
    assert conditions.load_before >= 0


def test_feed_runs_the_model() -> None:
    model = get_engine("onnxruntime").load(models.linear(3, 2), {"threads": 1})
    x = np.ones((1, 3), np.float32)
    outputs = feed(model, {"x": x})()
    np.testing.assert_allclose(outputs["y"], x @ models.linear_weight(3, 2), rtol=1e-5)


def test_rows_are_repeated_from_the_first() -> None:
    rows = repeat_rows({"x": np.arange(6).reshape(3, 2)}, 5)["x"]
    np.testing.assert_array_equal(rows[:, 0], [0, 2, 4, 0, 2])
    assert rows.flags.c_contiguous
