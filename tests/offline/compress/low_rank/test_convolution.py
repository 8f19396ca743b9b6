"""The factors of convolutions: exact at full rank, and within the bounds of the theorems at lower ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.offline.compress.low_rank.convolution import (
    forms,
    products,
    rank_choices,
    spatial,
    spatial_split,
    tucker,
)
from penstock.offline.compress.low_rank.matrix import Moments

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((12, 10, 3, 5))


def moments(channels: int, rows: int = 500) -> Moments:
    found = Moments(channels)
    mixing = RNG.standard_normal((channels, channels)) * np.exp(RNG.normal(0, 1, channels))
    found.update(RNG.standard_normal((rows, channels)) @ mixing)
    return found


def from_spatial(factors: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.einsum("rcy,orx->ocyx", factors[0][..., 0], factors[1][:, :, 0, :])


def from_tucker(factors: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.einsum("qc,pqyx,op->ocyx", factors[0][:, :, 0, 0], factors[1], factors[2][:, :, 0, 0])


@pytest.mark.parametrize("aware", [True, False])
def test_full_ranks_give_the_weight_back(aware: bool) -> None:
    inputs, results = (moments(10), moments(12)) if aware else (None, None)
    whole = spatial_split(spatial(WEIGHT, inputs), 30, WEIGHT.shape).factors
    np.testing.assert_allclose(from_spatial(whole), WEIGHT, atol=1e-9)
    split, error = tucker(WEIGHT, (10, 12), inputs, results)
    np.testing.assert_allclose(from_tucker(split.factors), WEIGHT, atol=1e-9)
    assert error < 1e-6


@pytest.mark.parametrize("rank", [1, 7, 20])
def test_spatial_is_the_best_by_eckart_and_young(rank: int) -> None:
    found = spatial(WEIGHT, None)
    got = from_spatial(spatial_split(found, rank, WEIGHT.shape).factors)
    values = np.linalg.svd(WEIGHT.transpose(0, 3, 1, 2).reshape(60, 30), compute_uv=False)
    want = np.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
    assert np.linalg.norm(got - WEIGHT) / np.linalg.norm(WEIGHT) == pytest.approx(want)
    assert found.error(rank) == pytest.approx(want)


def test_tucker_is_no_worse_than_the_higher_order_svd() -> None:
    ranks = (5, 6)
    split, error = tucker(WEIGHT, ranks, None, None)
    assert error == pytest.approx(np.linalg.norm(from_tucker(split.factors) - WEIGHT) / np.linalg.norm(WEIGHT))
    before = np.linalg.svd(WEIGHT.transpose(1, 0, 2, 3).reshape(10, -1))[0][:, : ranks[0]]
    after = np.linalg.svd(WEIGHT.reshape(12, -1))[0][:, : ranks[1]]
    plain = np.einsum("ocyx,op,cq,ap,bq->abyx", WEIGHT, after, before, after, before, optimize=True)
    assert error < np.linalg.norm(plain - WEIGHT) / np.linalg.norm(WEIGHT)


def test_what_the_inputs_carry_decides() -> None:
    """Channels with almost no signal get no rank."""
    scales = np.where(np.arange(10) < 5, 1.0, 1e-3)
    inputs = Moments(10)
    inputs.update(RNG.standard_normal((4000, 10)) * scales)
    for got in (
        from_spatial(spatial_split(spatial(WEIGHT, inputs), 15, WEIGHT.shape).factors),
        from_tucker(tucker(WEIGHT, (5, 12), inputs, None)[0].factors),
    ):
        error = np.linalg.norm((got - WEIGHT) * scales[None, :, None, None]) / np.linalg.norm(
            WEIGHT * scales[None, :, None, None]
        )
        assert error < 0.05


@pytest.mark.parametrize(
    ("kernel", "count"), [((), 1), ((1, 1), 1), ((3, 3), 3), ((3,), 2), ((3, 3, 3), 2), ((1, 3), 2)]
)
def test_forms(kernel: tuple[int, ...], count: int) -> None:
    assert len(forms(kernel)) == count


@settings(deadline=None)
@given(st.integers(2, 600), st.integers(2, 600), st.sampled_from([(), (1, 1), (3, 3), (5, 5), (1, 7), (3,)]), st.data())
def test_ranks_multiply_less_in_multiples_of_eight(
    outputs: int, inputs: int, kernel: tuple[int, ...], data: st.DataObject
) -> None:
    shape = (outputs, inputs, *kernel)
    form = data.draw(st.sampled_from(forms(kernel)))
    for ranks in rank_choices(shape, form):
        assert products(shape, form, ranks) < products(shape, None) == math.prod(shape)
        assert all(rank >= 8 and rank % 8 == 0 for rank in ranks)
