from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.offline.judge.scoring.numbers import correlation, fidelity, mae, r2, rmse

WANT = np.random.default_rng(0).normal(3, 2, (60, 3)).astype(np.float32)
GOT = (WANT + np.random.default_rng(1).normal(0, 0.7, WANT.shape)).astype(np.float32)


def test_as_in_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    assert mae(GOT, WANT) == pytest.approx(metrics.mean_absolute_error(WANT, GOT))
    assert rmse(GOT, WANT) == pytest.approx(metrics.mean_squared_error(WANT.reshape(-1), GOT.reshape(-1)) ** 0.5)
    assert r2(GOT, WANT) == pytest.approx(metrics.r2_score(WANT, GOT))


def test_correlation_is_pearsons() -> None:
    want = np.mean([np.corrcoef(GOT[:, one], WANT[:, one])[0, 1] for one in range(3)])
    assert correlation(GOT, WANT) == pytest.approx(want, abs=1e-6)
    assert correlation(-3 * WANT + 5, WANT) == pytest.approx(-1)
    assert correlation(np.ones_like(WANT), WANT) == 0


def test_a_column_of_output_and_a_row_of_labels_are_paired_by_sample() -> None:
    assert mae(GOT[:, :1], WANT[:, 0]) == pytest.approx(np.abs(GOT[:, 0] - WANT[:, 0]).mean(), rel=1e-5)


def test_columns_that_do_not_vary_are_left_out() -> None:
    want = np.concatenate([WANT, np.ones((60, 1))], axis=1)
    assert r2(np.concatenate([GOT, np.zeros((60, 1))], axis=1), want) == pytest.approx(r2(GOT, WANT))
    with pytest.raises(InvalidData, match="the same for every sample"):
        r2(GOT, np.ones_like(WANT))


def test_fidelity_is_relative_to_the_spread_whatever_the_offset() -> None:
    near, far = fidelity(GOT, WANT), fidelity(GOT + 100, WANT + 100)
    np.testing.assert_allclose(near, far, atol=1e-4)
    assert fidelity(WANT, WANT).min() == 1
    assert fidelity(WANT * 100, WANT).min() == 0
