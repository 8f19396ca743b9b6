"""``torch.nn.functional.interpolate`` without PyTorch.

1. With antialias, PyTorch uses Pillow's kernels in FP32, which are Pillow's for pictures of mode ``F``.
2. Without, its bilinear and bicubic filters have OpenCV's sample points (half pixels, clamped at the border) and weights (a = -0.75).
3. ``nearest`` takes the pixel ``floor(i * (in / out))``, computed in FP32.
4. ``area`` averages the pixels from ``floor(i * in / out)`` to ``ceil((i + 1) * in / out)``.
"""

from __future__ import annotations

import cv2
import numpy as np
from PIL import Image

from penstock.tensor import Array

_PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_OPENCV = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def interpolated(pixels: Array, height: int, width: int, filter: str, *, antialias: bool) -> Array:
    """``pixels`` [height, width, channels] in another size. UINT8 is rounded as torchvision does: to even, and clamped."""
    if filter == "nearest":
        rows, columns = _nearest(pixels.shape[0], height), _nearest(pixels.shape[1], width)
        return np.ascontiguousarray(pixels[rows[:, None], columns])
    real = pixels.astype(np.float32)
    found: Array
    if filter == "area":
        found = _averaged(_averaged(real, height, 0), width, 1).astype(np.float32)
    elif antialias:
        size, resample = (width, height), _PILLOW[filter]
        channels = range(real.shape[2])
        found = np.dstack([np.asarray(Image.fromarray(real[..., c]).resize(size, resample)) for c in channels])
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
