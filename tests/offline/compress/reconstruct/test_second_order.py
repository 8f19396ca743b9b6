"""Integers by second moments: never worse than rounding to nearest, at most one step away, and those of GPTQ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.offline.compress.reconstruct import second_order
from penstock.offline.compress.reconstruct.second_order import HeldOutMoments, WeightGrid, error, rounded
from penstock.tensor import Array


def grid(weight: Array, limit: int, channelwise: bool = True) -> WeightGrid:
    """Symmetric integers up to ``limit``, with a scale for each group and output, or for each weight."""
    largest = np.abs(weight).max(axis=1, keepdims=True)
    scale = (largest / limit if channelwise else np.broadcast_to(largest / limit, weight.shape)).astype(np.float32)
    nearest = np.clip(np.round(weight / np.where(scale == 0, 1, scale)), -limit, limit)
    return WeightGrid(nearest.astype(np.float32), scale)


def moments(rows: Array, held_out: Array) -> HeldOutMoments:
    with np.errstate(over="ignore"):
        return HeldOutMoments(*(np.asarray(one.swapaxes(1, 2) @ one, np.float32) for one in (rows, held_out)))


def correlated(rng: np.random.Generator, groups: int, rows: int, inputs: int, rank: int) -> Array:
    hidden = rng.standard_normal((groups, 2 * rows, rank)) @ rng.standard_normal((groups, rank, inputs))
    return np.maximum(hidden, 0)


@settings(max_examples=150, deadline=None)
@given(
    groups=st.integers(1, 3),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 5),
    rows=st.sampled_from([0, 1, 2, 30, 400]),
    rank=st.integers(1, 40),
    limit=st.sampled_from([1, 7, 64, 127]),
    dead=st.floats(0, 1),
    size=st.sampled_from([1e-30, 1.0, 1e18]),
    channelwise=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_never_worse_and_at_most_one_step_away(  # noqa: PLR0917
    groups, inputs, outputs, rows, rank, limit, dead, size, channelwise, seed
):
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((groups, inputs, outputs)) * (rng.random((1, inputs, outputs)) > 0.2)).astype("f4")
    x = correlated(rng, groups, rows, inputs, rank) * (rng.random((groups, 1, inputs)) >= dead) * size
    seen, known = moments(x[:, :rows], x[:, rows:]), grid(weight, limit, channelwise)
    with np.errstate(all="raise", under="ignore"):
        found = rounded(weight, known, seen)
    if found is None:
        return
    for one in seen:
        assert error(weight, known, found, one) < error(weight, known, known.nearest, one)
    assert np.abs(found - known.nearest).max() == 1
    assert known.nearest.min() <= found.min() <= found.max() <= known.nearest.max()
    assert not found[weight == 0].any()
    without_input = (np.diagonal(seen.fit, axis1=1, axis2=2) == 0)[..., None]
    np.testing.assert_array_equal(np.where(without_input, found, 0), np.where(without_input, known.nearest, 0))


def test_correlated_inputs_halve_the_error_on_fresh_rows():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((1, 200, 30)).astype(np.float32)
    x = correlated(rng, 1, 3000, 200, 20)
    known, seen, fresh = grid(weight, 7), moments(x[:, :2000], x[:, 2000:3000]), moments(x[:, 3000:], x[:, :0]).fit
    found = rounded(weight, known, seen)
    assert found is not None
    assert error(weight, known, found, fresh) < 0.25 * error(weight, known, known.nearest, fresh)


def by_updates(weight: Array, known: WeightGrid, moments: Array, damping: float) -> Array:
    """GPTQ as it was published: each error is made up for by updates of the weights that are still to be rounded."""
    values, scale = weight[0].astype(np.float64), np.broadcast_to(known.scale, weight.shape)[0]
    h = moments[0].astype(np.float64)
    order = np.argsort(-np.diagonal(h), kind="stable")
    h = h[order][:, order] + damping * np.diagonal(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left, found = values[order].copy(), np.empty(values.shape)
    for at in range(len(h)):
        nearest = known.nearest[0][order[at]]
        low, high = (np.clip(nearest + by, known.nearest.min(), known.nearest.max()) for by in (-1, 1))
        found[at] = np.clip(np.round(left[at] / scale[order[at]]), low, high)
        wrong = (left[at] - found[at] * scale[order[at]]) / upper[at, at]
        left[at:] -= np.outer(upper[at, at:], wrong)
    result = np.empty(values.shape)
    result[order] = found
    return result[None]


@pytest.mark.parametrize("inputs", [5, 40, 300])
def test_the_integers_are_those_of_gptq(inputs):
    rng = np.random.default_rng(inputs)
    weight = rng.standard_normal((1, inputs, 12)).astype(np.float32)
    x = correlated(rng, 1, 500, inputs, 10) + 0.1 * rng.standard_normal((1, 1000, inputs))
    known, h = grid(weight, 7), moments(x, x[:, :0]).fit
    found, wanted = second_order._carried(weight, known, h, 0.01), by_updates(weight, known, h, 0.01)
    # Sums in another order decide a few ties differently.
    assert (found == wanted).mean() > 0.99
    assert error(weight, known, found, h) == pytest.approx(error(weight, known, wanted, h), rel=0.02)


def test_weights_on_the_grid_stay():
    rng = np.random.default_rng(0)
    weight = rng.integers(-7, 8, (2, 30, 4)).astype(np.float32)
    weight[:, 0] = 7
    x = correlated(rng, 2, 100, 30, 5)
    assert rounded(weight, grid(weight, 7), moments(x[:, :100], x[:, 100:])) is None


def test_a_block_with_scale_zero_stays_and_its_neighbours_do_not():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((1, 32, 4)).astype(np.float32)
    weight[:, :16] = 1e-42
    scale = np.repeat(np.float32([0, 1 / 7]), 16)[None, :, None]
    nearest = np.where(scale == 0, 0, np.clip(np.round(weight * 7), -7, 7)).astype(np.float32)
    x = correlated(rng, 1, 400, 32, 4)
    found = rounded(weight, WeightGrid(nearest, scale), moments(x[:, :400], x[:, 400:]))
    assert found is not None
    assert not found[:, :16].any()
    assert (found != nearest).any()


def test_infinite_moments_change_nothing():
    weight = np.random.default_rng(0).standard_normal((1, 4, 2)).astype(np.float32)
    for value in (np.inf, np.nan):
        large = np.full((1, 4, 4), value, np.float32)
        assert rounded(weight, grid(weight, 7), HeldOutMoments(large, large)) is None
