"""Where calls run, in generated worlds and in virtual time: close to the better side, with few probes, and soon after a change."""

import random
from statistics import fmean

import pytest

from benchmarks.simulated_links import World, changing_world, play, steady_world
from penstock.offloading.choice import Side
from penstock.offloading.side_choice import SideChoice

_DEVICE_S = 0.05


def test_calls_are_within_ten_percent_of_the_better_side_in_every_steady_world() -> None:
    for seed in range(40):
        world = steady_world(random.Random(seed))
        outcome = play(world, 1000, seed)
        assert outcome.ratio <= 1.1, world
        assert max(outcome.probe_shares.values()) < 0.25, world


def test_a_few_lost_packets_at_the_start_do_not_decide_for_long() -> None:
    ratios = [play(steady_world(random.Random(seed)), 150, seed).ratio for seed in range(100)]
    assert max(ratios) <= 1.15


@pytest.mark.parametrize("share", [0.8, 0.95, 1, 1.05, 1.25])
@pytest.mark.parametrize("noise", [0, 0.3, 1])
def test_near_the_break_even_point(share: float, noise: float) -> None:
    world = World(_DEVICE_S, noise / 2, share * _DEVICE_S, noise)
    assert play(world, 1000, 0).ratio <= 1.1


def test_links_that_change_cost_little_on_average() -> None:
    ratios = [play(changing_world(random.Random(seed)), 2000, seed).ratio for seed in range(20)]
    assert fmean(ratios) < 1.06
    assert max(ratios) < 1.35


@pytest.mark.parametrize(("slow", "fast"), [(10, 0.1), (10, 0.9), (1.1, 0.9), (1.1, 0.1), (4, 0.5), (2, 0.3)])
def test_a_change_is_followed_within_a_number_of_calls(slow: float, fast: float) -> None:
    period = 1000
    world = World(_DEVICE_S, 0, slow * _DEVICE_S, 0, later_s=fast * _DEVICE_S, period=period)
    sides = play(world, 3 * period, 0).sides
    assert set(sides[period - 100 : period]) == {Side.DEVICE}
    better = sides[period : 2 * period].index(Side.SERVER)
    assert better <= 20 * (slow + 2 * fast) + 5  # a probe on the slow link, then two on the fast one
    assert set(sides[period + better : 2 * period]) == {Side.SERVER}
    assert sides[2 * period :].index(Side.DEVICE) <= 3
    assert set(sides[2 * period + 3 :]) == {Side.DEVICE}


def test_a_call_to_the_server_counts_until_the_device_has_answered() -> None:
    choice = SideChoice()
    for _ in range(10):
        choice.measured(Side.DEVICE, 1, 0.1, 0)
        choice.measured(Side.SERVER, 1, 0.01, 0)
    choice.measured(Side.SERVER, 1, 60.0, 0)
    late_s = 2 * 0.01 + 0.005 + 0.1
    assert choice.predicted(1)[1] == pytest.approx((9 * 0.01 + late_s) / 10)


def test_a_refusal_forever_outlives_later_answers_and_failures() -> None:
    choice = SideChoice()
    choice.failed("another model", 0, forever=True)
    choice.answered()
    choice.failed("cut", 1)
    assert choice.server_error
    assert not choice.is_probe_due(Side.SERVER, 1e9)


def test_a_failure_is_retried_after_its_time_and_forgotten_after_an_answer() -> None:
    choice = SideChoice()
    choice.failed("cut", 0)
    assert not choice.is_probe_due(Side.SERVER, 0.4)
    assert choice.is_probe_due(Side.SERVER, 0.5)
    choice.answered()
    assert not choice.server_error
