"""Errors that many values have in common."""

from __future__ import annotations

import numpy as np

from penstock.offline.convert.parity.means import systematic

RNG = np.random.default_rng(0)
EXACT = RNG.standard_normal((32, 8, 16))
RUNS = [EXACT + 0.02 * RNG.standard_normal(EXACT.shape) for _ in range(8)]
EVERY = np.ones(EXACT.shape, bool)


def found(error: np.ndarray, *, stepped: bool = False) -> str:
    return systematic(error, EXACT, RUNS, EVERY, stepped=stepped).reason


def test_noise_is_not_systematic() -> None:
    for seed in range(1, 51):
        assert found(0.01 * np.random.default_rng(seed).standard_normal(EXACT.shape)) == ""


def test_a_gain_far_below_the_noise_of_a_value_is_found() -> None:
    assert "the slope of its errors is 0.005" in found(0.005 * EXACT + 0.01 * RNG.standard_normal(EXACT.shape))


def test_a_bias_of_one_channel_is_found() -> None:
    error = 0.01 * RNG.standard_normal(EXACT.shape)
    error[:, 3] += 0.006
    assert "the mean of its errors is" in found(error)
    assert found(error, stepped=True) == ""


def test_larger_noise_is_found() -> None:
    assert "root mean square" in found(0.05 * RNG.standard_normal(EXACT.shape))


def test_an_outlier_is_no_mean() -> None:
    error = np.zeros(EXACT.shape)
    error[0, 0, 0] = 100.0
    assert found(error) == ""


def test_the_gain_that_would_be_found() -> None:
    assert 0 < systematic(np.zeros(EXACT.shape), EXACT, RUNS, EVERY, stepped=False).gain < 0.01
