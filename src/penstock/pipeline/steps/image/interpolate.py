"""``torch.nn.functional.interpolate`` without PyTorch.

1. With antialias, each pixel is a weighted mean along one axis, and then along the other, with Pillow's kernels.
2. Without, its bilinear and bicubic filters have OpenCV's sample points (half pixels, clamped at the border) and weights (a = -0.75).
3. ``nearest`` takes the pixel ``floor(i * (in / out))``, computed in FP32.
4. ``area`` averages the pixels from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)`` along both axes.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np

from penstock.tensor import Array

_OPENCV = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_MAX_STRIDE = 32
_MAX_TERMS = 64
"""Longest sum of equal weights in FP32: the rounding errors of a longer one could add up to more than 1e-5."""


def interpolated(pixels: Array, height: int, width: int, filter: str, *, antialias: bool) -> Array:
    """``pixels`` [height, width, channels] in another size. UINT8 is rounded as torchvision does: to even, and clamped."""
    if filter == "nearest":
        rows, columns = _nearest(pixels.shape[0], height), _nearest(pixels.shape[1], width)
        return pixels.take(rows, axis=0).take(columns, axis=1)
    real = np.ascontiguousarray(pixels, np.float32)
    found: Array
    if filter == "area":
        counts = [_covered(*sides)[1] for sides in ((len(real), height), (real.shape[1], width))]
        is_long = max(counts[0].max(), counts[1].max()) > _MAX_TERMS
        sums = _summed(real.astype(np.float64 if is_long else np.float32, copy=False), height, width, filter)
        found = (sums / np.multiply.outer(*counts)[..., None].astype(sums.dtype)).astype(np.float32, copy=False)
    elif antialias:
        found = _summed(real, height, width, filter)
    else:
        found = cv2.resize(real, (width, height), interpolation=_OPENCV[filter]).reshape(height, width, -1)
    return np.rint(found).clip(0, 255).astype(np.uint8) if pixels.dtype == np.uint8 else found


def _nearest(old: int, new: int) -> Array:
    scale = np.float32(old) / np.float32(new)
    return np.minimum((np.arange(new, dtype=np.float32) * scale).astype(np.int64), old - 1)


def _covered(old: int, new: int) -> tuple[Array, Array]:
    """For each row of the result, the first row that it covers, and their number."""
    index = np.arange(new)
    starts = index * old // new
    return starts, -(-(index + 1) * old // new) - starts


def _summed(pixels: Array, height: int, width: int, filter: str) -> Array:
    old_height, old_width, channels = pixels.shape
    rows = _weighted(pixels.reshape(old_height, -1), height, filter).reshape(height, old_width, channels)
    columns = _weighted(cv2.transpose(rows).reshape(old_width, -1), width, filter).reshape(width, height, channels)
    return cv2.transpose(columns).reshape(height, width, channels)


def _weighted(rows: Array, new: int, filter: str) -> Array:
    """Weighted sums of ``rows``. A matrix product would give other bits with other numbers of BLAS threads."""
    found = np.empty((new, rows.shape[1]), rows.dtype)
    row, item = rows.strides
    for where, start, step, weights in _runs(len(rows), new, filter):
        shape, strides = (*weights.shape, rows.shape[1]), (step * row, row, item)
        windows: Array = np.ndarray(shape, rows.dtype, rows, start * row, strides)
        np.einsum("ns,nsc->nc", weights.astype(rows.dtype, copy=False), windows, out=found[where])
    return found


@lru_cache(maxsize=64)
def _runs(old: int, new: int, filter: str) -> tuple[tuple[slice, int, int, Array], ...]:
    """All rows of the result, in runs whose first rows in the picture are evenly spaced, so that one call sums a run.

    Each run has its rows of the result, the first row of the picture, the step to that of the next row, and the rows' weights. If
    ``stride * old / new`` is close to a whole number, every ``stride``-th row of the result begins this step later, until the rounding
    of a first or last row differs. With the best stride, there are only a few times ``sqrt(new)`` runs.
    """
    starts, counts, weights = _taps(old, new, filter)

    def is_next(stride: int) -> Array:
        step = round(stride * old / new)
        found: Array = (starts[stride:] - starts[:-stride] == step) & (counts[stride:] == counts[:-stride])
        return found

    stride, runs = max(range(1, _MAX_STRIDE + 1), key=lambda stride: np.count_nonzero(is_next(stride))), []
    for first in range(min(stride, new)):
        breaks = np.flatnonzero(~is_next(stride)[first::stride]) + 1
        for part in np.split(np.arange(first, new, stride), breaks):
            start = int(part[0])
            rows = slice(start, int(part[-1]) + 1, stride)
            runs.append((rows, int(starts[start]), round(stride * old / new), weights[rows, : counts[start]].copy()))
    return tuple(runs)


def _taps(old: int, new: int, filter: str) -> tuple[Array, Array, Array]:
    """For each row of the result, the first row that it depends on, their number, and their weights, padded with zeros."""
    if filter == "area":
        starts, counts = _covered(old, new)
        return starts, counts, np.ones((new, counts.max()), np.float32)
    scale = old / new
    stretch, radius = max(scale, 1.0), 1 if filter == "bilinear" else 2
    centres = (np.arange(new) + 0.5) * scale
    starts = np.maximum((centres - radius * stretch + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + radius * stretch + 0.5).astype(np.int64), old) - starts
    offsets = np.arange(counts.max())
    weights = _kernel((starts[:, None] + offsets - centres[:, None] + 0.5) / stretch, filter)
    weights[offsets >= counts[:, None]] = 0
    return starts, counts, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _kernel(distance: Array, filter: str) -> Array:
    """The triangle, or Keys's cubic with a = -0.5 [R. Keys, 1981]."""
    x = np.abs(distance)
    if filter == "bilinear":
        return np.asarray(np.maximum(1 - x, 0))
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0)))
