"""Round the weights of a layer up or down so that their errors cancel in the layer's results.

The method is that of E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR
2023. With the error e of a channel's weights and H = E[xxᵀ] over the layer's inputs x, the squared error of the channel's results is
eᵀHe. If H = M Mᵀ with an upper triangular M, this is ‖Mᵀe‖², and component k of Mᵀe depends only on the first k weights. So the
weights are rounded one after the other, those with the largest inputs first, and each makes its component as small as possible. This
gives the same integers as GPTQ's updates by the inverse of H, and needs no inverse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.tensor import Array

_DAMPINGS = (0.01, 0.1, 1.0)
"""Values to try for the damping: the fraction of the mean of H's diagonal that is added to the diagonal. The fewer the rows of data,
the more damping is needed."""
_WORTH_IT = 0.99
"""Weights are changed only if the squared error falls below this fraction of the error of rounding to nearest."""
_COLUMNS = 1024
"""Number of outputs that are rounded together, which bounds the memory."""
_BLOCK = 128
"""Number of weights after which the errors are carried to all later weights in one matrix product."""


class WeightGrid(NamedTuple):
    """The representable values of a layer's weights, integers times scales, in arrays of shape (groups, inputs, outputs)."""

    nearest: Array
    """The integers by rounding to nearest, minus the zero point; FP32."""
    scale: Array
    """FP32. Can be broadcast to the shape of ``nearest``."""


class HeldOutMoments(NamedTuple):
    """Sums of xxᵀ over the rows of a layer's inputs, (groups, inputs, inputs)."""

    fit: Array
    """Over the rows that the integers are chosen by."""
    held_out: Array
    """Over the rows that the choice is judged on."""


def rounded(weight: Array, grid: WeightGrid, moments: HeldOutMoments) -> Array | None:
    """The integers for ``weight``, (groups, inputs, outputs), that lower the error of the layer's results; INT8.

    Each integer differs from rounding to nearest by at most 1 and stays in the range of ``grid.nearest``. Weights of 0 stay 0, so that
    pruned models stay sparse. None if rounding to nearest is better on the rows to fit or on the rows held out.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = _best(weight, grid, moments)
    return None if found is None else found.astype(np.int8)


def _best(weight: Array, grid: WeightGrid, moments: HeldOutMoments) -> Array | None:
    usual = [error(weight, grid, grid.nearest, one) for one in moments]
    found, least = None, _WORTH_IT * usual[1]
    for damping in _DAMPINGS if min(usual) > 0 else ():
        try:
            tried = _carried(weight, grid, moments.fit, damping)
        except np.linalg.LinAlgError:  # H is too close to singular
            continue
        held_out = error(weight, grid, tried, moments.held_out)
        if held_out < least and error(weight, grid, tried, moments.fit) < usual[0]:
            found, least = tried, held_out
        elif found is not None:
            break
    return found


def error(weight: Array, grid: WeightGrid, integers: Array, moments: Array) -> float:
    """The summed squared error of the layer's results."""
    wrong = weight - integers * grid.scale
    return float(((moments @ wrong) * wrong).sum(dtype=np.float64))


def _carried(weight: Array, grid: WeightGrid, moments: Array, damping: float) -> Array:
    """The integers if each error is carried to the weights that are rounded later."""
    diagonal = np.diagonal(moments, axis1=1, axis2=2)
    order = np.argsort(-diagonal, axis=1, kind="stable")
    groups, last = np.arange(len(order))[:, None], order[:, ::-1]
    damped = moments[groups[..., None], last[:, :, None], last[:, None, :]].astype(np.float64)
    places = range(weight.shape[1])
    damped[:, places, places] += damping * diagonal.mean(axis=1, dtype=np.float64, keepdims=True)
    factor = np.linalg.cholesky(damped)[:, ::-1, ::-1]
    del damped
    shares = (factor / np.diagonal(factor, axis1=1, axis2=2)[:, None]).astype(np.float32)
    del factor
    limits = float(grid.nearest.min()), float(grid.nearest.max())
    result = np.empty_like(grid.nearest)
    for start in range(0, weight.shape[2], _COLUMNS):
        some = slice(start, start + _COLUMNS)
        values, nearest, scale = (
            one[groups, order, some] for one in (weight, grid.nearest, np.broadcast_to(grid.scale, weight.shape))
        )
        result[groups, order, some] = _columns(values, nearest, scale, shares, limits)
    return result


def _columns(values: Array, nearest: Array, scale: Array, shares: Array, limits: tuple[float, float]) -> Array:
    """The integers of some outputs. The inputs are in the order of rounding."""
    count = values.shape[1]
    moves = ((values != 0) & (scale != 0)).astype(np.float32)
    low, high = np.maximum(nearest - moves, limits[0]), np.minimum(nearest + moves, limits[1])
    safe = np.where(scale == 0, np.float32(1), scale)
    found, wrong, carried = nearest.copy(), np.zeros_like(values), np.zeros_like(values)
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        for at in range(start, stop):
            wanted = (values[:, at] + carried[:, at]) / safe[:, at]
            found[:, at] = np.clip(np.round(wanted), low[:, at], high[:, at])
            wrong[:, at] = values[:, at] - found[:, at] * scale[:, at]
            carried[:, at + 1 : stop] += shares[:, at, at + 1 : stop, None] * wrong[:, at, None]
        carried[:, stop:] += shares[:, start:stop, stop:].swapaxes(1, 2) @ wrong[:, start:stop]
    return found
