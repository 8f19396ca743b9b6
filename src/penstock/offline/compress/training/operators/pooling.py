"""Pooling over spatial windows, and over all spatial axes."""

from __future__ import annotations

import math

from penstock.offline.compress.training.operators.linear import CONVOLUTIONS
from penstock.offline.compress.training.operators.registry import Node, operator, table
from penstock.offline.compress.training.operators.windows import Windows, pad, read_windows
from penstock.offline.compress.training.torch import Tensor, functional, torch

_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGES = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


@operator("MaxPool")
def max_pool(node: Node, x: Tensor) -> Tensor:
    if len(node.outputs) > 1:
        raise node.unsupported("the indices of a MaxPool")
    windows = _read(node, x)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = pad(windows.pad(x, lowest), *_overhang(node, windows, x), lowest)
    return _MAX_POOLS[len(windows.kernel)](padded, windows.kernel, windows.stride, 0, windows.dilation)


@operator("AveragePool")
def average_pool(node: Node, x: Tensor) -> Tensor:
    """The sum of each window divided by its number of elements. Padding elements count only with ``count_include_pad``."""
    windows = _read(node, x)
    overhang = _overhang(node, windows, x)
    ones = torch.ones_like(x[:1, :1])
    counted = windows.pad(ones, 1.0 if node.get("count_include_pad", 0) else 0.0)
    sums = _window_sums(pad(windows.pad(x), *overhang), windows)
    return sums / _window_sums(pad(counted, *overhang), windows)


@operator("LpPool")
def lp_pool(node: Node, x: Tensor) -> Tensor:
    windows, p = _read(node, x), node.get("p", 2)
    padded = pad(windows.pad(x), *_overhang(node, windows, x))
    sums = _window_sums(padded.abs() ** p, windows)
    # The root has no derivative at zero, so it is not computed there.
    positive = sums > 0
    return torch.where(positive, torch.where(positive, sums, 1.0) ** (1 / p), 0.0)


table(
    {
        "GlobalAveragePool": lambda x: x.mean(list(range(2, x.ndim)), keepdim=True),
        "GlobalMaxPool": lambda x: x.amax(list(range(2, x.ndim)), keepdim=True),
    }
)


def _read(node: Node, x: Tensor) -> Windows:
    kernel = list(node.get("kernel_shape"))
    if len(kernel) not in _MAX_POOLS or len(kernel) != x.ndim - 2:
        raise node.unsupported(f"a pool over {len(kernel)} axes of {x.ndim}")
    return read_windows(node, kernel, list(x.shape[2:]))


def _overhang(node: Node, windows: Windows, x: Tensor) -> tuple[list[int], list[int]]:
    """Padding to add for the last, partial window of ``ceil_mode``: before the first element (always 0), and after the last element.

    A window that would start after the last element is dropped.
    """
    none = [0] * len(windows.kernel)
    if not node.get("ceil_mode", 0):
        return none, none
    behind = []
    for axis, size in enumerate(x.shape[2:]):
        step, reach = windows.stride[axis], windows.reach[axis]
        padded = size + windows.begin[axis] + windows.end[axis]
        last = -(-(padded - reach) // step) * step
        if last >= size + windows.begin[axis]:
            last -= step
        behind.append(max(0, last + reach - padded))
    return none, behind


def _window_sums(x: Tensor, windows: Windows) -> Tensor:
    if set(windows.dilation) == {1}:
        return _AVERAGES[len(windows.kernel)](x, windows.kernel, windows.stride) * math.prod(windows.kernel)
    kernel = torch.ones([1, 1, *windows.kernel], dtype=x.dtype)
    planes = x.reshape(-1, 1, *x.shape[2:])
    sums = CONVOLUTIONS[len(windows.kernel)](planes, kernel, None, windows.stride, 0, windows.dilation)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])
