"""``torch.nn.functional.interpolate`` without PyTorch.

1. With antialias, each pixel is a weighted mean along one axis, and then along the other, with Pillow's kernels.
2. Without, its bilinear and bicubic filters have OpenCV's sample points (half pixels, clamped at the border) and weights (a = -0.75).
3. ``nearest`` takes the pixel ``floor(i * (in / out))``, computed in FP32.
4. ``area`` averages the pixels from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import msgspec
import numpy as np

from penstock.tensor import Array

_OPENCV = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_MAX_STRIDE = 32


def interpolated(pixels: Array, height: int, width: int, filter: str, *, antialias: bool) -> Array:
    """``pixels`` [height, width, channels] in another size. UINT8 is rounded as torchvision does: to even, and clamped."""
    if filter == "nearest":
        rows, columns = _nearest(pixels.shape[0], height), _nearest(pixels.shape[1], width)
        return np.ascontiguousarray(pixels[rows[:, None], columns])
    real = np.ascontiguousarray(pixels, np.float32)
    found: Array
    if filter == "area":
        found = _averaged(_averaged(real, height, 0), width, 1).astype(np.float32)
    elif antialias:
        found = _antialiased(real, height, width, filter)
    else:
        found = cv2.resize(real, (width, height), interpolation=_OPENCV[filter]).reshape(height, width, -1)
    return np.rint(found).clip(0, 255).astype(np.uint8) if pixels.dtype == np.uint8 else found


def _nearest(old: int, new: int) -> Array:
    scale = np.float32(old) / np.float32(new)
    return np.minimum((np.arange(new, dtype=np.float32) * scale).astype(np.int64), old - 1)


def _averaged(pixels: Array, new: int, axis: int) -> Array:
    """The mean of the pixels that each pixel of the result covers, along one axis."""
    old, index = pixels.shape[axis], np.arange(new)
    starts, ends = index * old // new, -(-(index + 1) * old // new)
    sums = np.cumsum(pixels, axis=axis, dtype=np.float64)
    sums = np.insert(sums, 0, 0, axis=axis)
    counts = (ends - starts).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    means: Array = (sums.take(ends, axis) - sums.take(starts, axis)) / counts
    return means


def _antialiased(pixels: Array, height: int, width: int, filter: str) -> Array:
    old_height, old_width, channels = pixels.shape
    rows = _weighted(pixels.reshape(old_height, -1), height, filter).reshape(height, old_width, channels)
    columns = _weighted(cv2.transpose(rows).reshape(old_width, -1), width, filter).reshape(width, height, channels)
    return cv2.transpose(columns).reshape(height, width, channels)


def _weighted(rows: Array, new: int, filter: str) -> Array:
    """Weighted sums of ``rows``. A matrix product would give other bits with other numbers of BLAS threads."""
    found = np.empty((new, rows.shape[1]), np.float32)
    row, item = rows.strides
    for run in _runs(len(rows), new, filter):
        windows: Array = np.ndarray(
            (*run.weights.shape, rows.shape[1]), np.float32, rows, run.start * row, (run.step * row, row, item)
        )
        np.einsum("ns,nsc->nc", run.weights, windows, out=found[run.rows])
    return found


class _Run(msgspec.Struct, frozen=True, eq=False):
    """Rows of the result whose first rows in the picture are evenly spaced, so that one call sums them all."""

    rows: slice
    start: int
    """First row of the picture for the first row of the result."""
    step: int
    weights: Array
    """One row of weights for each row of the result."""


@lru_cache(maxsize=64)
def _runs(old: int, new: int, filter: str) -> tuple[_Run, ...]:
    """All rows of the result.

    If ``stride * old / new`` is close to a whole number ``step``, every ``stride``-th row of the result begins ``step`` rows later,
    until the rounding of a first or last row differs. With the best stride, there are only a few times ``sqrt(new)`` runs.
    """
    starts, counts, weights = _taps(old, new, filter)

    def is_next(stride: int) -> Array:
        step = round(stride * old / new)
        found: Array = (starts[stride:] - starts[:-stride] == step) & (counts[stride:] == counts[:-stride])
        return found

    stride = max(range(1, _MAX_STRIDE + 1), key=lambda stride: np.count_nonzero(is_next(stride)))
    goes_on, runs = is_next(stride), list[_Run]()
    for first in range(min(stride, new)):
        breaks = np.flatnonzero(~goes_on[first::stride]) + 1
        for part in np.split(np.arange(first, new, stride), breaks):
            start, end = int(part[0]), int(part[-1]) + 1
            rows = slice(start, end, stride)
            runs.append(
                _Run(rows, int(starts[start]), round(stride * old / new), weights[rows, : counts[start]].copy())
            )
    return tuple(runs)


def _taps(old: int, new: int, filter: str) -> tuple[Array, Array, Array]:
    """For each row of the result, the first row that it depends on, their number, and their weights, padded with zeros."""
    scale, radius = old / new, 1 if filter == "bilinear" else 2
    stretch = max(scale, 1.0)
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
