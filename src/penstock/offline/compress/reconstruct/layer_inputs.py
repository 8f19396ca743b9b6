"""The inputs of linear layers as rows, and their second moments on data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import onnx

from penstock.offline.compress.ptq.qdq_placement import attributes_of
from penstock.offline.compress.reconstruct.second_order import HeldOutMoments
from penstock.offline.compress.taps import Taps
from penstock.offline.optimize.linear import linear_form
from penstock.tensor import Array

_ROWS, _ROWS_EACH, _LEAST_ROWS = 8192, 8, 1024
"""Approximate number of rows of each input that the moments include: ``_ROWS_EACH`` per weight of a channel, within these bounds."""
_FIT_SHARE = 0.75
"""The fraction of each batch's rows that the integers are chosen by. The remaining rows judge the choice."""


class LayerInput(NamedTuple):
    """The input of a layer: a tensor and, for a convolution, the windows that the convolution reads."""

    tensor: str
    groups: int
    inputs: int
    """The number of weights of one output channel, which is the length of a row."""
    kernel: tuple[int, ...] = ()
    """Empty for a matrix product."""
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] | str = ()
    """The attribute ``pads``, or the value of ``auto_pad``."""

    @property
    def moment_bytes(self) -> int:
        """Memory for the moments."""
        return 2 * 4 * self.groups * self.inputs**2

    def rows(self, array: Array, most: int) -> Array:
        """Up to about ``most`` random rows of ``array``, a batch of the tensor, in order; shape (groups, rows, inputs)."""
        random = np.random.default_rng(0)
        if not self.kernel:
            rows = array.reshape(-1, self.inputs)
            return rows[_chosen(random, len(rows), most)][None]
        windows = self._windows(array)
        sizes, channels = windows.shape[2 : 2 + len(self.kernel)], array.shape[1] // self.groups
        places = _chosen(random, math.prod(sizes), -(-most // max(1, len(array))))
        where: tuple[Any, ...] = slice(None), slice(None), *np.unravel_index(places, sizes)
        picked = np.asarray(windows[where])
        split = picked.reshape(len(array), self.groups, channels, len(places), math.prod(self.kernel))
        return split.transpose(1, 0, 3, 2, 4).reshape(self.groups, len(array) * len(places), self.inputs)

    def _windows(self, array: Array) -> Array:
        """A view of shape (samples, channels, *positions, *kernel)."""
        reach = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)]
        padded = np.pad(array, [(0, 0), (0, 0), *self._padding(array.shape[2:], reach)])
        if any(size < needed for size, needed in zip(padded.shape[2:], reach, strict=True)):
            return np.zeros((len(array), array.shape[1], *(0 for _ in reach), *self.kernel), array.dtype)
        found = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, array.ndim)))
        steps = (*self.strides, *self.dilations)
        return np.asarray(found[(slice(None), slice(None), *(slice(None, None, step) for step in steps))])

    def _padding(self, sizes: tuple[int, ...], reach: list[int]) -> list[tuple[int, int]]:
        if isinstance(self.pads, str):
            found = []
            for size, needed, stride in zip(sizes, reach, self.strides, strict=True):
                total = max(0, (-(-size // stride) - 1) * stride + needed - size) if self.pads != "VALID" else 0
                more, less = -(-total // 2), total // 2
                found.append((less, more) if self.pads == "SAME_UPPER" else (more, less))
            return found
        rank = len(sizes)
        return [(self.pads[at], self.pads[at + rank]) for at in range(rank)]


def layer_input(node: onnx.NodeProto, shape: tuple[int, ...]) -> LayerInput:
    """The input of ``node``, a Conv, Gemm or MatMul with a weight of ``shape``."""
    given: dict[str, Any] = attributes_of(node)
    form = linear_form(node.op_type, given.get)
    assert form is not None
    if node.op_type != "Conv":
        return LayerInput(node.input[0], 1, shape[form.inputs])
    rank = len(shape) - 2
    ones = [1] * rank
    auto = given.get("auto_pad", b"NOTSET").decode()
    pads = tuple(given.get("pads", [0] * (2 * rank))) if auto == "NOTSET" else auto
    strides, dilations = (tuple(given.get(name, ones)) for name in ("strides", "dilations"))
    return LayerInput(node.input[0], form.groups, math.prod(shape[1:]), shape[2:], strides, dilations, pads)


def observe(
    taps: Taps, inputs: Collection[LayerInput], is_over: Callable[[], bool] = lambda: False
) -> dict[LayerInput, HeldOutMoments]:
    """The moments of ``inputs``. When ``is_over`` returns True, the remaining batches are not read.

    Memory: ``moment_bytes`` of each input, and one batch.
    """
    readers: dict[str, list[LayerInput]] = {}
    found: dict[LayerInput, HeldOutMoments] = {}
    for one in dict.fromkeys(inputs):
        readers.setdefault(one.tensor, []).append(one)
        fit, held_out = (np.zeros((one.groups, one.inputs, one.inputs), np.float32) for _ in range(2))
        found[one] = HeldOutMoments(fit, held_out)
    for tensor, array in taps.run(list(readers)):
        for one in readers[tensor]:
            wanted = min(_ROWS, max(_LEAST_ROWS, _ROWS_EACH * one.inputs))
            rows = one.rows(array, math.ceil(wanted / taps.batches.count))
            cut = math.ceil(rows.shape[1] * _FIT_SHARE)
            for total, part in zip(found[one], (rows[:, :cut], rows[:, cut:]), strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    np.add(total, part.swapaxes(1, 2) @ part, out=total)
        if is_over():
            break
    return found


def _chosen(random: np.random.Generator, count: int, most: int) -> Array:
    """Up to ``most`` of the numbers below ``count``, in order."""
    return np.sort(random.choice(count, most, replace=False)) if count > most else np.arange(count)
