"""The bounds cover at the confidence that they claim, for every number of samples."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
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
