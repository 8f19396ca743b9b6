from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

import models
from penstock.clock import ManualClock
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.perf.measure import (
    FEWEST_CALLS,
    FEWEST_LOADS,
    LOADS,
    Timings,
    feed,
    interleave,
    repeat,
    speedup,
    weighted,
)
from penstock.tensor import Array

SIMULATIONS = 1000
"""Comparisons in each simulation."""


def taking(clock: ManualClock, seconds: float, calls: list[str] | None = None, name: str = "") -> Callable[[], None]:
    """A run that takes ``seconds`` on ``clock`` and writes its name into ``calls``."""

    def run() -> None:
        clock.advance(seconds)
        if calls is not None:
            calls.append(name)

    return run


def measure(
    clock: ManualClock, runs: Mapping[str, Callable[[], None]], budget_s: float, **options
) -> dict[str, Timings]:
    return interleave(runs, budget_s, clock=clock, rest=clock.advance, **options)


def test_every_way_is_timed_by_the_clock() -> None:
    clock = ManualClock()
    timings = measure(clock, {"slow": taking(clock, 0.010), "quick": taking(clock, 0.005)}, budget_s=1.0)
    assert timings["slow"].p50_ms == pytest.approx(10)
    assert timings["quick"].p50_ms == pytest.approx(5)
    assert timings["slow"].p99_ms == pytest.approx(10)


@pytest.mark.parametrize("seconds", [0.0001, 0.01, 0.1])
def test_the_budget_bounds_the_time(seconds: float) -> None:
    clock = ManualClock()
    timings = measure(clock, {"a": taking(clock, seconds), "b": taking(clock, seconds)}, budget_s=5.0)
    assert 4.5 <= clock.now() <= 5.5
    assert timings["a"].calls >= 0.7 * 2.5 / seconds - 10


def test_a_budget_of_nothing_still_gives_the_fewest_calls() -> None:
    clock, calls = ManualClock(), []
    timings = measure(clock, {"a": taking(clock, 3.0, calls)}, budget_s=0.0)
    assert timings["a"].calls == 2
    assert len(calls) == FEWEST_CALLS


def test_timing_ends_after_enough_calls() -> None:
    clock = ManualClock()
    timings = measure(clock, {"slow": taking(clock, 0.005), "quick": taking(clock, 0.001)}, 1000.0, enough=300)
    assert 300 <= timings["slow"].calls < 320
    assert clock.now() < 5


def test_blocks_alternate_in_changing_order_and_its_reverse() -> None:
    clock, calls = ManualClock(), []
    runs = {name: taking(clock, 0.03, calls, name) for name in "abc"}
    measure(clock, runs, budget_s=3.0)
    rounds = ["".join(calls[start : start + 3]) for start in range(9, len(calls), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) == 6
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))


def test_a_drift_affects_all_alike() -> None:
    clock = ManualClock()

    def run() -> None:
        clock.advance(0.001 * (1 + clock.now()))

    timings = measure(clock, {"a": run, "b": run}, budget_s=1.0)
    assert timings["b"].p50_ms == pytest.approx(timings["a"].p50_ms, rel=0.05)


@pytest.mark.parametrize(("budget_s", "milliseconds"), [(0.5, 1), (0.0, 1), (0.0, 9), (0.03, 4)])
def test_cold_calls_are_dropped_at_the_start_and_after_every_turn(budget_s: float, milliseconds: int) -> None:
    clock = ManualClock()
    last, streak = "", 0

    def run(name: str) -> None:
        nonlocal last, streak
        streak = streak + 1 if name == last else 1
        last = name
        clock.advance(1e-3 * milliseconds * (3 if streak == 1 else 1))

    timings = measure(clock, {name: lambda name=name: run(name) for name in "ab"}, budget_s)
    assert timings["a"].p99_ms == pytest.approx(milliseconds)
    assert timings["b"].p99_ms == pytest.approx(milliseconds)


@pytest.mark.parametrize(("count", "milliseconds"), [(2, 1), (3, 4), (5, 9)])
def test_no_size_is_called_twice_in_a_row_and_each_has_its_own_timings(count: int, milliseconds: int) -> None:
    clock = ManualClock()
    last = ""

    def run(name: str, size: int) -> None:
        nonlocal last
        is_repeated, is_cold, last = last == f"{name}{size}", last[:1] != name, f"{name}{size}"
        clock.advance(1e-3 * (milliseconds + size) * (0.1 if is_repeated else 5 if is_cold else 1))

    runs = {name: [lambda name=name, size=size: run(name, size) for size in range(count)] for name in "ab"}
    for timings in interleave(runs, 2.0, clock=clock, rest=clock.advance).values():
        assert len({len(one.seconds) for one in timings.sizes}) == 1
        for size, one in enumerate(timings.sizes):
            assert np.concatenate(one.seconds) == pytest.approx(1e-3 * (milliseconds + size))


def test_threads_come_to_rest_before_every_block() -> None:
    clock, rests, calls = ManualClock(), [], []

    def rest(seconds: float) -> None:
        rests.append(len(calls))
        clock.advance(seconds)

    runs = {name: taking(clock, 0.03, calls, name) for name in "ab"}
    interleave(runs, 0.5, clock=clock, rest=rest)
    assert rests == list(range(6, len(calls)))


def test_collection_is_off_while_timing_and_restored_after_a_failure() -> None:
    seen = []

    def failing() -> None:
        seen.append(gc.isenabled())
        if len(seen) > 2:
            raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError, match="the model failed"):
        interleave({"a": failing}, budget_s=0.0)
    assert gc.isenabled()
    assert seen[-1] is False


def test_loads_end_with_the_budget_but_there_are_at_least_three() -> None:
    clock = ManualClock()

    def load(number: int) -> dict[str, Array]:
        clock.advance(1.0)
        return {"a": np.array([0.1, number])}

    assert len(repeat(load, 8, 4.5, clock)["a"].seconds) == 5
    assert len(repeat(load, 8, 0.0, clock)["a"].seconds) == FEWEST_LOADS
    assert len(repeat(load, 1, 100.0, clock)["a"].seconds) == 1
    assert [part[1] for part in repeat(load, 8, 100.0, clock)["a"].seconds] == list(range(8))


class Machine:
    """A simulated machine on which latencies have the effects of a real one.

    Each load has a speed of its own; the clock frequency drifts; a neighbour slows all down for some time, now and then; and single
    calls are interrupted, seldom but for long.
    """

    def __init__(self, seed: int, load_spread: float = 0.02, neighbour: float = 0.0) -> None:
        self.clock, self._rng = ManualClock(), np.random.default_rng(seed)
        self._load_spread, self._neighbour = load_spread, neighbour
        self._drift, self._switch, self._slow = self._rng.lognormal(), 0.0, 1.0

    def time_load(self, latencies: Mapping[str, float], number: int, budget_s: float = 0.2) -> dict[str, Array]:
        runs = {name: self._loaded(seconds) for name, seconds in latencies.items()}
        found = interleave(runs, budget_s, number, self.clock, self.clock.advance, 10)
        return {name: np.concatenate(one.seconds) for name, one in found.items()}

    def compare(self, base_s: float, other_s: float, loads: int) -> Interval:
        latencies = {"base": base_s, "other": other_s}
        found = repeat(lambda number: self.time_load(latencies, number), loads, math.inf, self.clock)
        return speedup(found["base"], found["other"])

    def _loaded(self, seconds: float) -> Callable[[], None]:
        seconds *= self._rng.lognormal(0, self._load_spread)

        def run() -> None:
            now, rng = self.clock.now(), self._rng
            if now >= self._switch:
                self._switch = now + rng.exponential(0.05)
                self._slow = 1 + self._neighbour * rng.random() if rng.random() < 0.3 else 1.0
            interrupted = 0.01 * rng.pareto(1.5) if rng.random() < 0.01 else 0.0
            self.clock.advance(
                seconds * self._slow * math.exp(0.2 * math.sin(self._drift * now)) * rng.lognormal(0, 0.02)
                + interrupted
            )

        return run


@pytest.mark.parametrize(
    ("loads", "load_spread", "neighbour", "ratio", "width"),
    [
        (LOADS, 0.02, 0.0, 1.0, 1.06),
        (LOADS, 0.05, 1.0, 1.3, 1.25),
        (FEWEST_LOADS, 0.02, 0.0, 1.3, 1.2),
        (4, 0.0, 1.0, 1.0, 1.3),
    ],
)
def test_the_interval_holds_the_true_ratio(
    loads: int, load_spread: float, neighbour: float, ratio: float, width: float
) -> None:
    found = [Machine(seed, load_spread, neighbour).compare(ratio * 0.004, 0.004, loads) for seed in range(SIMULATIONS)]
    held = sum(one.low <= ratio <= one.high for one in found) / SIMULATIONS
    assert held >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / SIMULATIONS)
    assert np.median([one.value for one in found]) == pytest.approx(ratio, rel=0.005)
    assert np.median([one.high / one.low for one in found]) < width


def test_the_blocks_of_one_load_say_nothing_about_the_next() -> None:
    missed = 0
    for seed in range(200):
        machine = Machine(seed)
        found = interleave(
            {name: machine._loaded(0.004) for name in ("base", "other")},
            1.0,
            seed,
            machine.clock,
            machine.clock.advance,
        )
        one = speedup(found["base"], found["other"])
        missed += not one.low <= 1 <= one.high
    assert missed > 100


def test_speedup_is_the_reciprocal_with_the_sides_exchanged() -> None:
    rng = np.random.default_rng(0)
    base, other = (Timings(list(rng.lognormal(0, 0.1, (8, 5)))) for _ in range(2))
    there, back = speedup(base, other), speedup(other, base)
    assert (1 / back.value, 1 / back.high, 1 / back.low) == pytest.approx((there.value, there.low, there.high))
    assert there.low < there.value < there.high


def test_speedup_is_exact_without_noise() -> None:
    base, other = Timings([np.full(3, 0.04)] * 4), Timings([np.full(5, 0.01)] * 4)
    interval = speedup(base, other)
    assert (interval.low, interval.value, interval.high) == pytest.approx((4, 4, 4))


def test_speedup_is_paired_by_load() -> None:
    loads = np.random.default_rng(0).lognormal(0, 1, (6, 1))
    interval = speedup(Timings(list(2 * loads)), Timings(list(loads)))
    assert (interval.low, interval.high) == pytest.approx((2, 2))


def test_one_pair_has_no_interval() -> None:
    one = Timings([np.ones(100)])
    with pytest.raises(ValueError, match="at least two pairs"):
        speedup(one, one)


def test_percentiles_are_over_all_calls_in_milliseconds() -> None:
    timings = Timings(np.arange(1, 101, dtype=float).reshape(10, 10) / 1e3)
    assert timings.p50_ms == pytest.approx(50.5)
    assert timings.p99_ms == pytest.approx(99.01)


def test_the_p50_is_the_median_of_the_loads() -> None:
    timings = Timings([np.full(100, 0.001), np.full(1, 0.002), np.full(1, 0.003)])
    assert timings.p50_ms == pytest.approx(2)
    assert timings.calls == 102


def test_timings_that_were_measured_apart_are_joined() -> None:
    joined = Timings([np.ones(2)], "busy").joined(Timings([np.zeros(3)]))
    assert (joined.calls, len(joined.seconds), joined.busy) == (5, 2, "busy")


def test_feed_runs_the_model() -> None:
    model = get_engine("onnxruntime").load(models.linear(3, 2), {"threads": 1})
    x = np.ones((1, 3), np.float32)
    outputs = feed(model, {"x": x})()
    np.testing.assert_allclose(outputs["y"], x @ models.linear_weight(3, 2), rtol=1e-5)


def test_several_sizes_count_by_their_shares() -> None:
    sizes = [Timings([np.array([1.0, 1, 2]), np.array([2.0])]), Timings([np.array([10.0]), np.array([20.0, 20])])]
    both = weighted(sizes, [0.9, 0.1])
    np.testing.assert_allclose(both.medians, [0.9 + 1, 0.9 * 2 + 2])
    assert both.calls == 7
    # The values 1, 1, 2, 2 hold 90 % of the calls, and the values 10, 20, 20 hold 10 %.
    assert [both.percentile_ms(percent) for percent in (40, 50, 89, 93, 99)] == [1e3, 2e3, 2e3, 1e4, 2e4]
    again = both.joined(both)
    assert again.calls == 14
    assert again.p50_ms == pytest.approx(both.p50_ms)
    assert weighted(sizes[:1], [1.0]) is sizes[0]


def test_the_speedup_over_sizes_is_that_of_the_mean_time() -> None:
    before = weighted([Timings([np.full(3, 4.0)] * 3), Timings([np.full(3, 40.0)] * 3)], [0.5, 0.5])
    after = weighted([Timings([np.full(3, 1.0)] * 3), Timings([np.full(3, 39.0)] * 3)], [0.5, 0.5])
    assert speedup(before, after).value == pytest.approx(44 / 40)


def test_the_interval_of_a_speed_up_is_students() -> None:
    base, other = Timings([np.full(3, 1.0)] * 3), Timings([np.full(3, math.exp(-one)) for one in (0.0, 0.1, 0.2)])
    found = speedup(base, other)
    reach = 4.302653 * 0.1 / math.sqrt(3)  # the quantile for 97.5 % and 2 degrees of freedom; the deviation is 0.1
    assert found.value == pytest.approx(math.exp(0.1))
    assert (found.low, found.high) == pytest.approx((math.exp(0.1 - reach), math.exp(0.1 + reach)), rel=1e-6)
