import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.scheduler.latency_model import LatencyModel

MS = 1_000_000
SECOND = 1000 * MS


def learn(sizes: dict[int, float], times: int = 100) -> LatencyModel:
    model = LatencyModel()
    for _ in range(times):
        for rows, ms in sizes.items():
            model.observe(rows, int(ms * MS), 0)
    return model


def test_nothing_is_known_before_the_first_batch() -> None:
    assert LatencyModel().upper(8, 0) == LatencyModel().mean(8, 0) == 0


def test_between_sizes_it_interpolates_and_beyond_them_it_hopes() -> None:
    model = learn({4: 10, 16: 22})
    assert model.mean(4, 0) == pytest.approx(10 * MS, rel=0.01)
    assert model.mean(10, 0) == pytest.approx(16 * MS, rel=0.01)
    assert model.mean(64, 0) == pytest.approx(22 * MS, rel=0.01)
    assert model.mean(2, 0) == pytest.approx(5 * MS, rel=0.01)


def test_the_upper_end_covers_most_of_a_noisy_model_and_one_pause_does_not_spoil_it() -> None:
    chance = random.Random(0)
    samples = [int(chance.gauss(10, 1) * MS) for _ in range(2000)]
    model = LatencyModel()
    covered = 0
    for sample in samples:
        covered += sample <= (model.upper(8, 0) or sample)
        model.observe(8, sample, 0)
    assert covered / len(samples) > 0.9
    model.observe(8, 5 * SECOND, 0)
    assert model.mean(8, 0) < 14 * MS


def test_it_follows_a_model_that_got_slower() -> None:
    model = learn({8: 1})
    for _ in range(40):
        model.observe(8, 50 * MS, 0)
    assert model.mean(8, 0) == pytest.approx(50 * MS, rel=0.1)


def test_what_was_measured_is_forgotten_size_by_size() -> None:
    model = learn({1: 1, 64: 500})
    model.observe(1, MS, 2 * SECOND)
    assert model.mean(64, 2 * SECOND) > 100 * MS  # eight runs of it have not passed yet
    assert model.mean(64, 3 * SECOND - 1) > 0
    model.observe(1, MS, 9 * SECOND)
    assert model.mean(64, 9 * SECOND) < 2 * MS
    assert model.mean(64, 11 * SECOND) == 0


@given(st.dictionaries(st.integers(1, 1024), st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(1, 2000))
def test_an_estimate_lies_within_what_was_measured(sizes: dict[int, float], rows: int) -> None:
    model = learn(sizes, times=3)
    assert 0 <= model.mean(rows, 0) <= max(sizes.values()) * MS + 1


def test_the_first_measurement_is_the_mean_with_a_quarter_of_it_as_deviation() -> None:
    model = learn({8: 12}, times=1)
    assert model.mean(8, 0) == 12 * MS
    assert model.upper(8, 0) == 18 * MS


def test_averages_move_by_an_eighth_and_deviations_by_a_quarter() -> None:
    model = learn({8: 8}, times=1)  # 8 ± 2
    model.observe(8, 16 * MS, 0)
    assert model.mean(8, 0) == 9 * MS
    assert model.upper(8, 0) == 9 * MS + 2 * int(3.5 * MS)
    model = learn({8: 8}, times=1)
    model.observe(12, 8 * MS, 0)  # of the bucket from 8 to 15 rows
    assert model.mean(4, 0) == pytest.approx(8 * MS * 4 / 8.5, abs=1)


def test_a_measurement_counts_up_to_twice_the_mean_plus_four_deviations() -> None:
    limited, long = learn({8: 8}, times=1), learn({8: 8}, times=1)
    limited.observe(8, (2 * 8 + 4 * 2) * MS, 0)
    long.observe(8, SECOND, 0)
    assert long.mean(8, 0) == limited.mean(8, 0) == 10 * MS
    assert long.upper(8, 0) == limited.upper(8, 0)
    shorter = learn({8: 8}, times=1)
    shorter.observe(8, 23 * MS, 0)
    assert shorter.mean(8, 0) < 10 * MS


def test_a_bucket_lives_for_a_second_or_eight_runs() -> None:
    model = learn({8: 8}, times=1)
    assert model.mean(8, SECOND - 1) == 8 * MS
    assert model.mean(8, SECOND) == 0
    slow = learn({8: 500}, times=1)
    assert slow.mean(8, 4 * SECOND - 1) == 500 * MS
    assert slow.mean(8, 4 * SECOND) == 0


def test_a_bucket_that_has_expired_begins_anew() -> None:
    model = learn({8: 8})
    model.observe(8, 80 * MS, SECOND)
    assert model.mean(8, SECOND) == 80 * MS
    assert model.mean(8, 2 * SECOND - 1) == 80 * MS


def test_sizes_within_a_power_of_two_share_a_bucket() -> None:
    model = learn({4: 4}, times=1)
    model.observe(7, 4 * MS, 0)
    model.observe(8, 80 * MS, 0)
    assert model.mean(7, 0) > 4 * MS
    assert model.mean(8, 0) == 80 * MS
