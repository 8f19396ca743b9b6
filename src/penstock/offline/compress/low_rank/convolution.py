"""Decompose convolutions into two or three smaller ones. Weights have the shape (outputs, inputs, *kernel).

CHANNEL  a convolution with the whole kernel to r channels, then a 1×1 convolution; the r channels are the principal components of the
         results (Zhang et al. 2015, §3.1)
SPATIAL  a height×1 convolution to r channels, then a 1×width convolution (M. Jaderberg et al., "Speeding up Convolutional Neural
         Networks with Low Rank Expansions", 2014, scheme 2)
TUCKER   a 1×1 convolution to fewer channels, a convolution with the whole kernel, and a 1×1 convolution back (Y.-D. Kim et al.,
         "Compression of Deep Convolutional Neural Networks for Fast and Low Power Mobile Applications", 2016)
"""

from __future__ import annotations

import enum
import math

import numpy as np

from penstock.offline.compress.low_rank.matrix import Decomposition, Moments, Split, descending
from penstock.tensor import Array

_SWEEPS = 5
_RANKS = 8
"""Number of ranks to try for each layer and form of split."""


class SplitForm(enum.Enum):
    """The form of a split. Matrix products only support CHANNEL."""

    CHANNEL = "channel"
    SPATIAL = "spatial"
    TUCKER = "tucker"


Way = tuple[SplitForm | None, tuple[int, ...]]
"""A way to run a layer: the form of the split, and its ranks. (None, ()) leaves the layer unsplit."""
WHOLE: Way = (None, ())


def forms(kernel: tuple[int, ...]) -> tuple[SplitForm, ...]:
    """The forms of split that are possible for a layer with this kernel. A matrix product has the kernel ()."""
    if math.prod(kernel) == 1:
        return (SplitForm.CHANNEL,)
    return tuple(SplitForm) if len(kernel) == 2 and min(kernel) > 1 else (SplitForm.CHANNEL, SplitForm.TUCKER)


def factor_shapes(shape: tuple[int, ...], form: SplitForm | None, ranks: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The shapes of a layer's factors, in the order of application. If ``form`` is None, the only shape is ``shape``."""
    outputs, inputs, *kernel = shape
    ones = (1,) * len(kernel)
    match form:
        case None:
            return [shape]
        case SplitForm.CHANNEL:
            return [(ranks[0], inputs, *kernel), (outputs, ranks[0], *ones)]
        case SplitForm.SPATIAL:
            return [(ranks[0], inputs, kernel[0], 1), (outputs, ranks[0], 1, kernel[1])]
        case SplitForm.TUCKER:
            return [(ranks[0], inputs, *ones), (ranks[1], ranks[0], *kernel), (outputs, ranks[1], *ones)]


def products(shape: tuple[int, ...], form: SplitForm | None, ranks: tuple[int, ...] = ()) -> int:
    """Multiplications per output position at stride 1, which is the number of weights. With ``form`` None, the layer is unsplit."""
    return sum(math.prod(factor) for factor in factor_shapes(shape, form, ranks))


def rank_choices(shape: tuple[int, ...], form: SplitForm) -> list[tuple[int, ...]]:
    """Up to 8 ascending ranks that need fewer multiplications than the unsplit layer: multiples of 16, or of 8 for narrow layers."""
    outputs, inputs, *_ = shape
    dense = products(shape, None)
    found: list[tuple[int, ...]]
    shares = [at / (_RANKS + 1) for at in range(1, _RANKS + 1)]
    if form is SplitForm.TUCKER:
        found = [(_multiple(inputs * share, inputs), _multiple(outputs * share, outputs)) for share in shares]
    else:
        most = dense / products(shape, form, (1,))
        found = [(_multiple(most * share, most),) for share in shares]
    return sorted({ranks for ranks in found if products(shape, form, ranks) < dense})


def spatial(weight: Array, inputs: Moments | None) -> Decomposition:
    """Factorise a weight [outputs, inputs, height, width] into a height×1 and a 1×width convolution, for ``spatial_split``.

    Minimises the error of the weights, weighted by the second moments of the input channels.
    """
    outputs, channels, height, width = weight.shape
    matrix = weight.astype(np.float64).transpose(0, 3, 1, 2)
    weighed = np.einsum("oxcy,cd->oxdy", matrix, _root(inputs, channels)).reshape(outputs * width, -1)
    carried, left = descending(weighed @ weighed.T)
    return Decomposition(left, left.T @ matrix.reshape(outputs * width, channels * height), carried, None, None)


def spatial_split(found: Decomposition, rank: int, shape: tuple[int, ...]) -> Split:
    """Factors (rank, inputs, height, 1) and (outputs, rank, 1, width) of a weight of ``shape``."""
    outputs, channels, height, width = shape
    columns, rows = found.at(rank).factors
    return Split(
        (
            columns.reshape(rank, channels, height, 1),
            rows.reshape(outputs, width, rank).transpose(0, 2, 1)[:, :, None, :],
        )
    )


def tucker(
    weight: Array, ranks: tuple[int, int], inputs: Moments | None, results: Moments | None
) -> tuple[Split, float]:
    """Factors (q, inputs, 1…), (p, q, *kernel), (outputs, p, 1…) for ``ranks`` (q, p), and their error, defined as in ``spatial``.

    Higher-order SVD, then alternating sweeps (L. De Lathauwer et al., "On the Best Rank-1 and Rank-(R1, …, RN) Approximation of
    Higher-Order Tensors", 2000). With data, the output side is fixed to the principal components of the results.
    """
    outputs, channels, *kernel = weight.shape
    ones = (1,) * len(kernel)
    root = _root(inputs, channels)
    whole = np.einsum("ock,cd->odk", weight.reshape(outputs, channels, -1), root)
    before = _leading(whole.transpose(1, 0, 2), ranks[0])
    after = _leading(whole, ranks[1])
    if results is not None:
        after = descending(results.second)[1][:, : ranks[1]]
    for _ in range(_SWEEPS):
        before = _leading(np.einsum("odk,op->dpk", whole, after), ranks[0])
        if results is not None:
            break
        after = _leading(np.einsum("odk,dq->oqk", whole, before), ranks[1])
    core = np.einsum("odk,op,dq->pqk", whole, after, before, optimize=True)
    first = np.linalg.solve(root.T, before).T.reshape(ranks[0], channels, *ones)
    energy = float((whole * whole).sum())
    error = np.sqrt(max(0.0, energy - float((core * core).sum())) / max(energy, 1e-300))
    last = after.reshape(outputs, ranks[1], *ones)
    return Split((first, core.reshape(ranks[1], ranks[0], *kernel), last)), float(error)


def _root(inputs: Moments | None, channels: int) -> Array:
    """The lower triangular matrix L with L Lᵀ = E[xxᵀ] + λI over the channels. Without data, L is the identity."""
    if inputs is None or not np.trace(inputs.second) > 0:
        return np.eye(channels)
    second = inputs.second
    return np.linalg.cholesky(second + 1e-3 * np.trace(second) / channels * np.eye(channels))


def _leading(unfolded: Array, rank: int) -> Array:
    """The leading ``rank`` left singular vectors of an array unfolded along its first axis."""
    matrix = unfolded.reshape(len(unfolded), -1)
    return descending(matrix @ matrix.T)[1][:, :rank]


def _multiple(value: float, most: float) -> int:
    step = 16 if most >= 64 else 8
    return max(step, round(value / step) * step)
