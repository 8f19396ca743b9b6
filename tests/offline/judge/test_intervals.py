"""The bounds cover at the confidence that they claim, for every number of samples."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.judge import intervals
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.intervals import (
    bounded_interval,
    jackknife_interval,
    loss_bound,
    loss_interval,
    mean_bound,
    proves_loss,
    rate_bound,
    tail,
)

RNG = np.random.default_rng


@given(samples=st.integers(1, 400), share=st.floats(0, 1), probability=st.sampled_from([0.05, 0.025, 0.001]))
def test_the_bound_of_a_rate_is_that_of_clopper_and_pearson(samples: int, share: float, probability: float) -> None:
    count = round(share * samples)
    want = stats.beta.ppf(1 - probability, count + 1, samples - count) if count < samples else 1.0
    assert rate_bound(count, samples, probability) == pytest.approx(want, abs=1e-7)


def test_without_flips_one_per_cent_is_proven_from_299_samples() -> None:
    assert proves_loss(299, 0, 0, 0.01, 0.05)
    assert not proves_loss(298, 0, 0, 0.01, 0.05)
    assert not proves_loss(400, 1, 0, 0.01, 0.05)
    assert loss_bound(299, 0, 0, 0.05) <= 0.01 < loss_bound(298, 0, 0, 0.05)


@pytest.mark.parametrize("samples", [1, 2, 6, 15])
@pytest.mark.parametrize("probability", [0.05, 0.004])
def test_a_bound_is_wrong_no_more_often_than_claimed(samples: int, probability: float) -> None:
    """All tables of ``samples`` pairs, with their exact probabilities, for a grid of true rates."""
    tables = [(lost, won) for lost in range(samples + 1) for won in range(samples + 1 - lost)]
    bounds = np.array([loss_bound(samples, lost, won, probability) for lost, won in tables])
    lost, won = np.array(tables).T
    for p in np.linspace(0.01, 0.97, 25):
        for q in np.linspace(0.005, 0.98 - p, 25).clip(0.001):
            chances = stats.multinomial.pmf(np.stack([lost, won, samples - lost - won], 1), samples, [p, q, 1 - p - q])
            assert chances[bounds < p - q].sum() <= probability


@functools.lru_cache
def objection(samples: int, lost: int, won: int, looks: int) -> str:
    bound = loss_bound(samples, lost, won, tail(looks))
    value = (lost - won) / samples
    found = Accuracy("top-1", 0.9, Interval(value, value, bound), 0.01, samples, bound, lost, won, looks)
    return Contract(0.01, prove_accuracy=True).accuracy_objection(found)


@pytest.mark.parametrize(
    ("samples", "changed", "looks"), [(299, 0.0, 1), (350, 0.002, 1), (900, 0.004, 1), (600, 0.01, 12)]
)
def test_of_ten_thousand_builds_with_a_loss_above_the_limit_at_most_a_twentieth_pass(
    samples: int, changed: float, looks: int
) -> None:
    """Each build judges ``looks`` candidates that all lose 1.01 %, on the same samples, and ships if any passes."""
    loss, builds = 0.0101, 10_000
    lost_rate, won_rate = loss + changed / 2, changed / 2
    tables = RNG(samples + looks).multinomial(samples, [lost_rate, won_rate, 1 - loss - changed], (builds, looks))
    kinds, which = np.unique(tables[..., :2].reshape(-1, 2), axis=0, return_inverse=True)
    passes = np.array(
        [lost < samples * 0.01 and not objection(samples, lost, won, looks) for lost, won in kinds.tolist()]
    )
    shipped = passes[which.reshape(builds, looks)].any(axis=1).mean()
    assert shipped <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / builds)
    if samples >= 600:
        good = RNG(0).multinomial(2 * samples, [won_rate, won_rate, 1 - changed], 40)
        assert np.mean([not objection(2 * samples, lost, won, looks) for lost, won, _ in good.tolist()]) > 0.3


@settings(max_examples=25)
@given(st.integers(1, 120), st.integers(0, 60), st.integers(0, 60))
def test_an_interval_is_antisymmetric_holds_the_loss_and_has_a_width(samples: int, lost: int, won: int) -> None:
    lost = min(lost, samples)
    won = min(won, samples - lost)
    loss, gain = loss_interval(samples, lost, won), loss_interval(samples, won, lost)
    assert loss.low <= loss.value <= loss.high
    assert loss.high - loss.low > 0
    assert (loss.low, loss.high) == (-gain.high, -gain.low)


def test_a_single_sample_proves_nothing() -> None:
    assert loss_interval(1, 0, 0).high > 0.97
    assert mean_bound(np.zeros(1), 0.05) > 0.9
    assert bounded_interval(np.zeros(1)).high > 0.9
    assert jackknife_interval(lambda rows: 0.0, 1).high > 0.9


def test_many_samples_keep_a_bound() -> None:
    """Where the tables are too many to sum, the bound is wider but one."""
    found = loss_bound(200_000, 4000, 4000, 0.05)
    assert 1.645 * math.sqrt(8000) / 200_000 < found < 4 * 1.645 * math.sqrt(8000) / 200_000
    assert proves_loss(200_000, 4000, 4000, found, 0.05)


@pytest.mark.parametrize("samples", [5, 60, 400])
@pytest.mark.parametrize("shape", [(0.05, 0.95), (0.5, 20.0), (3.0, 3.0)], ids=["rare", "small", "wide"])
def test_the_bound_of_a_mean_is_wrong_no_more_often_than_claimed(samples: int, shape: tuple[float, float]) -> None:
    values = RNG(0).beta(*shape, (1500, samples))
    mean = shape[0] / sum(shape)
    bounds = [mean_bound(row, 0.05) for row in values]
    assert np.mean(np.array(bounds) < mean) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(values))


def test_bounds_of_means_close_in() -> None:
    values = RNG(0).beta(2, 198, 2000)
    found = bounded_interval(values, least=0.0)
    assert found.low < 0.01 < found.high < 0.015
    assert bounded_interval(values, looks=20, least=0.0).high > found.high


@pytest.mark.parametrize("looks", [1, 10])
def test_the_jackknife_covers_a_smooth_statistic(looks: int) -> None:
    """The correlation of a bivariate normal distribution, for which Fisher's interval is known to hold."""
    rng, truth, runs = RNG(1), 0.6, 400
    covered = 0
    for _ in range(runs):
        x, noise = rng.normal(size=(2, 400))
        y = truth * x + math.sqrt(1 - truth**2) * noise
        found = jackknife_interval(lambda rows, x=x, y=y: float(np.corrcoef(x[rows], y[rows])[0, 1]), 400, looks)
        covered += found.low <= truth <= found.high
    assert covered / runs >= 1 - 0.05 / looks - 0.035


def p_value(samples: int, lost: int, won: int, limit: float) -> float:
    """The largest probability, over all rates of wins, of a table at most as likely to have a loss of ``limit``: all are tried."""
    rate = np.linspace(max(0.0, -limit), (1 - limit) / 2, 2001)[1:-1]
    tables = [(b, c) for b in range(samples + 1) for c in range(samples + 1 - b)]
    counts = np.array([(b, c, samples - b - c) for b, c in tables], float)
    logs = special.xlogy(counts[:, :, None], np.stack([rate + limit, rate, 1 - 2 * rate - limit])).sum(axis=1)
    ratio = special.xlogy(counts, counts / samples).sum(axis=1) - logs.max(axis=1)
    scores = np.sign(counts[:, 0] - counts[:, 1] - samples * limit) * np.sqrt(2 * ratio.clip(min=0))
    ways = stats.multinomial.logpmf(counts, samples, [1 / 3] * 3) + samples * math.log(3)
    chances = np.exp(logs + ways[:, None])
    return float(chances[scores <= scores[tables.index((lost, won))] + 1e-6].sum(axis=0).max())


@pytest.mark.parametrize(("samples", "limit"), [(8, 0.3), (12, 0.2), (12, -0.2), (20, 0.1)])
def test_the_test_of_a_loss_is_the_one_by_all_tables_and_rates(samples: int, limit: float) -> None:
    compared = 0
    for lost, won in [(lost, won) for lost in range(4) for won in range(3 if limit > 0 else 5)]:
        p = p_value(samples, lost, won, limit)
        if (lost - won) / samples < limit and p < 0.6:
            assert proves_loss(samples, lost, won, limit, 1.02 * p)
            assert not proves_loss(samples, lost, won, limit, 0.97 * p)
            compared += 1
    assert compared


@pytest.mark.parametrize(("limit", "lost", "won"), [(0.02, 0, 3), (0.05, 0, 1), (0.05, 1, 6)])
def test_the_probability_is_the_largest_and_not_that_of_a_rate_nearby(limit: float, lost: int, won: int) -> None:
    p = p_value(60, lost, won, limit)
    assert proves_loss(60, lost, won, limit, 1.005 * p)
    assert not proves_loss(60, lost, won, limit, 0.999 * p)


def test_a_loss_of_everything_is_excluded_by_one_sample() -> None:
    assert proves_loss(5, 4, 0, 1.0, 0.05)
    assert not proves_loss(5, 5, 0, 1.0, 0.05)
    assert not proves_loss(5, 1, 0, 0.2, 0.9)
    assert not proves_loss(5, 2, 0, 0.2, 0.9)
    assert loss_bound(5, 5, 0, 0.05) == 1.0


def test_bounds_are_as_fine_as_they_say() -> None:
    for bound, is_below in (
        (loss_bound(100, 3, 1, 0.05), lambda loss: not proves_loss(100, 3, 1, loss, 0.05)),
        (loss_bound(100, 1, 30, 0.05), lambda loss: not proves_loss(100, 1, 30, loss, 0.05)),
        (rate_bound(3, 100, 0.05), lambda rate: stats.binom.cdf(3, 100, rate) > 0.05),
    ):
        assert not is_below(bound + 1e-9)
        assert is_below(bound - 1.01e-5)
    values = np.full(50, 0.1)
    assert mean_bound(values, 0.05, 1.0) - mean_bound(values, 0.0500001, 1.0) < 1.01e-5


@pytest.mark.parametrize(("samples", "groups"), [(60, 20), (50, 20), (7, 7)])
def test_the_jackknife_of_a_mean_is_its_standard_error(samples: int, groups: int) -> None:
    """With groups of one size, it is that of the groups' means."""
    values = 10 * RNG(0).normal(size=samples)
    found = jackknife_interval(lambda rows: float(values[rows].mean()), samples)
    assert found.value == values.mean()
    assert found.high - found.value == pytest.approx(found.value - found.low)
    if samples % groups == 0:
        means = values.reshape(-1, groups).mean(axis=0)
        want = stats.t.ppf(0.975, groups - 1) * means.std(ddof=1) / math.sqrt(groups)
        assert found.high - found.value == pytest.approx(want, rel=0.01)
    sizes: list[int] = []
    jackknife_interval(lambda rows: float(sizes.append(len(rows)) or 0), samples)
    assert sizes[0] == samples
    assert len(sizes) == groups + 1
    assert {samples - size for size in sizes[1:]} == {samples // groups, -(-samples // groups)}


def test_the_jackknife_allows_for_a_kind_of_row_that_was_not_seen() -> None:
    """With probability 2.5 %, no sample is of a kind that has this share."""
    for samples, scale in itertools.product((1, 2, 20, 500), (0.5, 2.0)):
        reach = scale * (1 - 0.025 ** (1 / samples))
        found = jackknife_interval(lambda rows: 3.0, samples, scale=scale)
        assert (found.low, found.high) == (pytest.approx(3 - reach), pytest.approx(3 + reach))
    share = 1 - 0.0025 ** (1 / 20)
    assert jackknife_interval(lambda rows: 0.0, 20, looks=10).high == pytest.approx(share)


@pytest.mark.parametrize("undefined", [{7}, set(range(20))])
def test_the_jackknife_is_wide_if_the_statistic_is_undefined_without_a_group(undefined: set[int]) -> None:
    def statistic(rows: np.ndarray) -> float:
        return math.nan if any(len(rows) < 200 and one not in rows % 20 for one in undefined) else 3.0

    found = jackknife_interval(statistic, 200, scale=0.5)
    assert (found.value, found.low, found.high) == (3, 2.5, 3.5)


def test_undefined_groups_do_not_narrow_the_jackknife() -> None:
    values = 100 * RNG(0).normal(size=200)
    found = jackknife_interval(lambda rows: float(values[rows].mean()) if 3 in rows else math.nan, 200)
    assert found.high - found.value > 5


def test_no_statistic_is_computed_of_no_rows() -> None:
    values = np.array([0.25])
    found = jackknife_interval(lambda rows: float(values[rows].mean()), 1)
    assert found.value == 0.25
    assert math.isfinite(found.high)


def test_values_at_the_limit_are_values() -> None:
    """A bet on them loses all."""
    assert 0.1 < mean_bound(np.array([1.0, *[0.0] * 9]), 0.05) < 1
    assert mean_bound(np.ones(5), 0.05) == 1


def test_without_options_one_candidate_is_judged_on_scores_from_0_to_1() -> None:
    values = RNG(0).uniform(-0.5, 0.7, 100)
    assert bounded_interval(values) == bounded_interval(values, 1, -1.0, 1.0)
    assert mean_bound(values, 0.05) == mean_bound(values, 0.05, 1.0)
    assert loss_interval(100, 5, 2) == loss_interval(100, 5, 2, 1)
    assert jackknife_interval(lambda rows: 0.0, 9) == jackknife_interval(lambda rows: 0.0, 9, 1, 1.0)
    assert tail() == tail(1)


@pytest.mark.parametrize("samples", [10, 100, 1000, 100_000])
def test_the_tables_left_out_are_never_seen(samples: int) -> None:
    for rate in np.geomspace(0.1 / samples, 1, 30).tolist():
        assert stats.binom.sf(intervals._last(samples, rate), samples, rate) < 1e-8


def test_the_bound_of_a_mean_by_its_definition() -> None:
    """The least mean against which a mixture of sixteen bets wins 1 / probability."""
    for most, values in ((1.0, RNG(0).beta(2, 5, 80)), (2.0, RNG(1).uniform(-2, 2, 40))):
        bound = mean_bound(values, 0.05, most)
        for mean, wins in ((bound + 1e-9, True), (bound - 2e-5, False)):
            bets = 2.0 ** -np.arange(16) / (most - mean)
            wealth = np.prod(1 + bets[:, None] * (mean - values), axis=1).clip(min=0).mean()
            assert bool(wealth >= 1 / 0.05) is wins


def test_intervals_of_means_are_of_two_sides() -> None:
    values = RNG(0).uniform(-0.5, 0.7, 100)
    found = bounded_interval(values, 4, -1.0, 2.0)
    half = 0.05 / 4 / 2
    assert found == Interval(float(values.mean()), -mean_bound(-values, half, 1.0), mean_bound(values, half, 2.0))
    found = loss_interval(100, 5, 2, 4)
    assert found == Interval(0.03, -loss_bound(100, 2, 5, half), loss_bound(100, 5, 2, half))
    assert tail(4) == pytest.approx(0.0125)


def test_large_counts_are_bounded_apart() -> None:
    found = loss_bound(200_000, 4000, 3000, 0.05)
    apart = stats.beta.ppf(0.975, 4001, 196_000) - stats.beta.ppf(0.025, 3000, 197_001)
    assert found == pytest.approx(apart, abs=1e-7)
    assert not proves_loss(200_000, 4000, 3000, found - 1e-9, 0.05)
    assert proves_loss(200_000, 4000, 3000, found, 0.05)
