"""Approximate a weight matrix by the product of two low-rank factors that change the layer's results least.

The factors of W (outputs × inputs) of rank r that minimise E‖(W - Ŵ)x‖² over the data come from the singular value decomposition of W
C^½, with C = E[xxᵀ] + λI. If U has the left singular vectors as columns, Ŵ = U_r U_rᵀ W. The columns of U are also the principal
components of the layer's outputs (X. Zhang et al., "Accelerating Very Deep Convolutional Networks for Classification and Detection",
2015, §3.1): the eigenvectors of W C Wᵀ, which equals E[(Wx)(Wx)ᵀ] + λ W Wᵀ. So the moments of either x or Wx suffice. Those of the
side with fewer channels are used. If the layer has a bias, x and Wx are centred first, and the bias absorbs the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.tensor import Array

_RIDGE = 1e-4
"""λ adds this fraction to the variance of the results. It gives some weight to directions outside the samples."""


class Moments:
    """Mean and second moments of rows, accumulated in FP64. Takes 8 · channels² bytes."""

    def __init__(self, channels: int) -> None:
        self._sum = np.zeros(channels)
        self._products = np.zeros((channels, channels))
        self._count = 0

    def update(self, rows: Array) -> None:
        """Add ``rows`` of shape (rows, channels)."""
        rows = rows.astype(np.float64)
        self._sum += rows.sum(axis=0)
        self._products += rows.T @ rows
        self._count += len(rows)

    @property
    def mean(self) -> Array:
        return np.asarray(self._sum / max(1, self._count))

    @property
    def second(self) -> Array:
        """E[xxᵀ]."""
        return np.asarray(self._products / max(1, self._count))

    @property
    def covariance(self) -> Array:
        return np.asarray(self.second - np.outer(self.mean, self.mean))


class Split(NamedTuple):
    """The factors of one layer."""

    factors: tuple[Array, ...]
    """The factors in the order of application, each of shape (outputs, inputs, *kernel)."""
    shift: Array | None = None
    """Added to the bias of the last factor."""


class Decomposition(NamedTuple):
    """W at every rank r: Ŵ = left[:, :r] @ right[:r], with columns in descending order of ``carried``."""

    left: Array
    right: Array
    carried: Array
    """The part of E‖Wx‖² that each column carries, at least 0."""
    mean: Array | None
    """E[Wx], if a bias absorbs it."""
    projected: Array | None
    """E[right x]."""

    def at(self, rank: int, kernel: tuple[int, ...] = ()) -> Split:
        """The factors of ``rank``, of shapes (rank, inputs / prod(kernel), *kernel) and (outputs, rank, 1, …)."""
        left, right = self.left[:, :rank], self.right[:rank]
        # Balance the ranges of both factors for a later quantisation.
        norms = np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=1)
        balance = np.sqrt(np.where(norms[1] > 0, norms[0] / np.maximum(norms[1], 1e-150), 1.0))
        balance[balance == 0] = 1.0
        first = (right * balance[:, None]).reshape(rank, -1, *kernel)
        second = (left / balance).reshape(-1, rank, *(1 for _ in kernel))
        if self.mean is None or self.projected is None:
            return Split((first, second))
        return Split((first, second), self.mean - left @ self.projected[:rank])

    def error(self, rank: int) -> float:
        """Relative error of the results at ``rank``: the square root of the omitted columns' fraction of E‖Wx‖²."""
        return float(np.sqrt(self.carried[rank:].sum() / max(self.carried.sum(), 1e-300)))


def decompose(weight: Array, moments: Moments | None, *, of_results: bool, centred: bool) -> Decomposition:
    """Decompose ``weight`` (outputs, inputs) by the ``moments`` of Wx (``of_results``) or of x, or by a plain SVD without moments.

    Set ``centred`` if the layer has a bias: the bias absorbs the mean of the moments.
    """
    weight = weight.astype(np.float64)
    energy = float((weight * weight).sum())
    known = None if moments is None else moments.covariance if centred else moments.second
    mean = moments.mean if moments is not None and centred else None
    if of_results:
        products = weight @ weight.T
        if known is not None:
            products = known + _ridge(float(np.trace(known)), energy) * products
        carried, left = descending(products)
        return Decomposition(left, left.T @ weight, carried, mean, None if mean is None else left.T @ mean)
    inner, ridge = np.eye(weight.shape[1]), 1.0
    if known is not None:
        ridge = _ridge(float(((weight @ known) * weight).sum()), energy)
        inner = known + ridge * inner
    # Rounding in a Cholesky decomposition would lose λ if moments are large where weights are zero.
    values, axes = descending(inner)
    sizes = np.sqrt(np.maximum(values, ridge))
    scaled = weight @ (axes * sizes)
    carried, columns = descending(scaled.T @ scaled)
    right = columns.T @ (axes / sizes).T
    results = (None, None) if mean is None else (weight @ mean, right @ mean)
    return Decomposition(scaled @ columns, right, carried, *results)


def _ridge(total: float, energy: float) -> float:
    """The value of λ. If all data are zero, λ is 1, which gives the plain decomposition."""
    return _RIDGE * total / energy if total > 0 and energy > 0 else 1.0


def descending(symmetric: Array) -> tuple[Array, Array]:
    """Eigenvalues, at least 0, and eigenvectors as columns, in descending order."""
    values, vectors = np.linalg.eigh(symmetric)
    return np.maximum(values[::-1], 0.0), vectors[:, ::-1]
