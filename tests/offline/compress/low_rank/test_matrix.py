"""The two factors of a matrix against numpy's singular value decomposition, and against the data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.offline.compress.low_rank.matrix import Decomposition, Moments, decompose


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and rows of correlated inputs that are not centred."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((inputs, inputs)) * np.exp(rng.normal(0, 1.5, inputs))
    return rng.standard_normal((outputs, inputs)), rng.standard_normal((400, inputs)) @ mixing + rng.normal(
        0, 2, inputs
    )


def found(weight: np.ndarray, rows: np.ndarray, of_results: bool, centred: bool) -> Decomposition:
    moments = Moments(weight.shape[0 if of_results else 1])
    for part in np.array_split(rows @ weight.T if of_results else rows, 7):
        moments.update(part)
    return decompose(weight, moments, of_results=of_results, centred=centred)


def error(decomposition: Decomposition, rank: int, weight: np.ndarray, rows: np.ndarray) -> float:
    """Σ‖Wx - Ŵx - shift‖², by plain products."""
    split = decomposition.at(rank)
    first, second = split.factors
    got = (rows @ first.T) @ second.T + (0 if split.shift is None else split.shift)
    return float(((got - rows @ weight.T) ** 2).sum())


@pytest.mark.parametrize("of_results", [True, False])
def test_moments_are_those_of_numpy(of_results: bool) -> None:
    _, rows = problem(3, 5)
    moments = Moments(5)
    for part in np.array_split(rows.astype(np.float32), 3):
        moments.update(part)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.covariance, np.cov(rows.T, bias=True), rtol=1e-4, atol=1e-4)
    assert Moments(2).second.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("of_results", [True, False])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (9, 9)])
def test_without_data_it_is_the_svd(shape: tuple[int, int], of_results: bool) -> None:
    weight, _ = problem(*shape)
    values = np.linalg.svd(weight, compute_uv=False)
    for rank in range(1, min(shape) + 1):
        decomposition = decompose(weight, None, of_results=of_results, centred=True)
        first, second = decomposition.at(rank).factors
        want = np.sqrt((values[rank:] ** 2).sum())
        assert np.linalg.norm(second @ first - weight) == pytest.approx(want, abs=1e-9)
        assert decomposition.error(rank) == pytest.approx(want / np.linalg.norm(values), abs=1e-7)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_with_data_it_is_the_svd_of_the_results(shape: tuple[int, int]) -> None:
    """No Ŵ of that rank is closer to the results: the lower bound follows from the singular values of the results."""
    weight, rows = problem(*shape)
    values = np.linalg.svd(rows @ weight.T, compute_uv=False)
    for of_results in (True, False):
        decomposition = found(weight, rows, of_results, centred=False)
        for rank in (1, 3, 6):
            best = float((values[rank:] ** 2).sum())
            # The ridge costs little more than its share.
            assert best * (1 - 1e-9) <= error(decomposition, rank, weight, rows) <= 1.02 * best


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 999))
def test_both_sides_agree_and_beat_the_plain_one(outputs: int, inputs: int, seed: int) -> None:
    weight, rows = problem(outputs, inputs, seed)
    rank = max(1, min(outputs, inputs) // 2)
    one, other = (found(weight, rows, of_results, centred=True) for of_results in (True, False))
    plain = decompose(weight, None, of_results=True, centred=False)
    scale = float(((rows @ weight.T) ** 2).sum())
    by_one, by_other = (error(each, rank, weight, rows) for each in (one, other))
    assert by_one == pytest.approx(by_other, abs=1e-9 * scale, rel=1e-3)
    # 1e-3: the ridge weighs the plain error as well.
    assert by_one <= error(plain, rank, weight, rows) * 1.001 + 1e-9 * scale


def test_a_bias_takes_up_the_mean() -> None:
    weight, rows = problem(8, 12)
    rows = rows + 30
    centred, not_centred = (found(weight, rows, True, centred) for centred in (True, False))
    assert error(centred, 3, weight, rows) < error(not_centred, 3, weight, rows)
    residual = rows @ weight.T - (rows @ centred.at(3).factors[0].T) @ centred.at(3).factors[1].T
    np.testing.assert_allclose(residual.mean(0), centred.at(3).shift, atol=1e-6 * np.abs(rows).max() * 12)


@pytest.mark.parametrize("of_results", [True, False])
def test_awkward_weights_and_data_give_numbers(of_results: bool) -> None:
    weight, rows = problem(6, 6)
    awkward = ((weight * 0, rows), (weight, rows * 0), (np.ones((6, 6)), rows), (weight, np.ones((50, 6))))
    for w, x in awkward:
        split = found(w, x, of_results, centred=True).at(2)
        assert all(np.isfinite(factor).all() for factor in split.factors)
        assert np.isfinite(found(w, x, of_results, centred=True).error(2))


@pytest.mark.parametrize("seed", range(10))
def test_moments_that_are_huge_where_the_weights_are_zero(seed: int) -> None:
    """The ridge is small relative to them, so rounding may make the smallest eigenvalue negative."""
    weight, rows = problem(6, 6, seed)
    weight[:, :2] = 0
    rows[:, 0] *= 1e8
    rows[:, 1] = 0.3 * rows[:, 0]
    decomposition = found(weight, rows, of_results=False, centred=False)
    assert all(np.isfinite(factor).all() for factor in decomposition.at(2).factors)
    product = decomposition.at(6).factors
    np.testing.assert_allclose(product[1] @ product[0], weight, atol=1e-6)
