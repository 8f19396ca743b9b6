"""``torch.nn.functional.interpolate`` without PyTorch.

1. With antialias, each pixel is a weighted mean along one axis, and then along the other, with Pillow's kernels.
2. Without, its bilinear and bicubic filters have OpenCV's sample points (half pixels, clamped at the border) and weights (a = -0.75).
3. ``nearest`` takes the pixel ``floor(i * (in / out))``, computed in FP32.
4. ``area`` averages the pixels from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np

from penstock.tensor import Array

_OPENCV = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


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
    columns = _weighted(np.ascontiguousarray(rows.transpose(1, 2, 0)).reshape(old_width, -1), width, filter)
    return np.ascontiguousarray(columns.reshape(width, channels, height).transpose(2, 0, 1))


def _weighted(rows: Array, new: int, filter: str) -> Array:
    """Weighted sums of ``rows``. A matrix product would give other bits with other numbers of BLAS threads."""
    found = np.empty((new, rows.shape[1]), np.float32)
    for (start, weights), total in zip(_taps(len(rows), new, filter), found, strict=True):
        np.einsum("s,sc->c", weights, rows[start : start + weights.size], out=total)
    return found


@lru_cache(maxsize=64)
def _taps(old: int, new: int, filter: str) -> tuple[tuple[int, Array], ...]:
    """For each pixel of the result along one axis, the first pixel that it depends on, and the weights from there on."""
    scale, radius = old / new, 1 if filter == "bilinear" else 2
    stretch = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    starts = np.maximum((centres - radius * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + radius * stretch + 0.5).astype(np.int64), old)
    taps = []
    for start, end, centre in zip(starts.tolist(), ends.tolist(), centres.tolist(), strict=True):
        weights = _kernel((np.arange(start, end) - centre + 0.5) / stretch, filter)
        taps.append((start, (weights / weights.sum()).astype(np.float32)))
    return tuple(taps)


def _kernel(distance: Array, filter: str) -> Array:
    """The triangle, or Keys's cubic with a = -0.5 [R. Keys, 1981]."""
    x = np.abs(distance)
    if filter == "bilinear":
        return np.asarray(np.maximum(1 - x, 0))
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0)))
