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
_BAND = 8
"""Pixels of the result in one matrix of weights. Larger matrices are mostly zeros, and smaller ones need more calls."""


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
    rows = np.empty((height, old_width * channels), np.float32)
    for out, source, weights in _bands(old_height, height, filter):
        np.matmul(weights, pixels.reshape(old_height, -1)[source], out=rows[out])
    planes = np.ascontiguousarray(rows.reshape(height, old_width, channels).transpose(2, 0, 1)).reshape(-1, old_width)
    found = np.empty((channels * height, width), np.float32)
    for out, source, weights in _bands(old_width, width, filter):
        found[:, out] = planes[:, source] @ weights.T
    return np.ascontiguousarray(found.reshape(channels, height, width).transpose(1, 2, 0))


@lru_cache(maxsize=64)
def _bands(old: int, new: int, filter: str) -> tuple[tuple[slice, slice, Array], ...]:
    """The weights along one axis, as matrices of some pixels of the result and the pixels that they depend on."""
    scale, radius = old / new, 1 if filter == "bilinear" else 2
    stretch = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    starts = np.maximum((centres - radius * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + radius * stretch + 0.5).astype(np.int64), old)
    bands = []
    for first in range(0, new, _BAND):
        out = slice(first, min(first + _BAND, new))
        source = slice(int(starts[out][0]), int(ends[out][-1]))
        places = np.arange(source.start, source.stop)
        weights = _kernel((places - centres[out, None] + 0.5) / stretch, filter)
        weights *= (places >= starts[out, None]) & (places < ends[out, None])
        bands.append((out, source, (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)))
    return tuple(bands)


def _kernel(distance: Array, filter: str) -> Array:
    """The triangle, or Keys's cubic with a = -0.5 [R. Keys, 1981]."""
    x = np.abs(distance)
    if filter == "bilinear":
        return np.asarray(np.maximum(1 - x, 0))
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0)))
