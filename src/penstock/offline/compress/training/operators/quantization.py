"""QuantizeLinear and DequantizeLinear with straight-through gradients (Bengio, Léonard and Courville 2013).

Numbers and rounding are ONNX Runtime's: ``x / scale`` clamped, rounded half to even, the zero point added. Between the two
operators a quantised tensor is a float tensor that holds integers, because torch differentiates nothing else.

For ``y = dequantize(quantize(x, s), s)`` the composed gradients are those of Esser et al., "Learned Step Size
Quantization" (2020), eq. 3: to ``x`` 1 inside the range and 0 outside, to ``s`` ``round(x/s) - x/s`` inside, and the clamped
integer less the zero point outside. The paper's factor on the gradient of ``s`` (§2.2) is ``scaled_gradient``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.offline.compress.training.operators.elementwise import DTYPES
from penstock.offline.compress.training.operators.registry import Node, operator
from penstock.offline.compress.training.torch import Tensor, torch


def round_through(x: Tensor) -> Tensor:
    """``x`` rounded half to even; the gradient passes as if it were not."""
    return x + (torch.round(x) - x).detach()


def scaled_gradient(elements: int, largest: int) -> Callable[[Tensor], Tensor]:
    """A weight hook for the scale of ``elements`` values: the same scale, its gradient by ``1 / sqrt(elements * largest)``."""
    factor = 1 / math.sqrt(elements * largest)
    return lambda scale: scale.detach() + (scale - scale.detach()) * factor


@operator("QuantizeLinear", fixed=(1,))
def quantize_linear(node: Node, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    dtype = _integer(node, zero_point)
    bounds = torch.iinfo(dtype)
    zero = x.new_zeros(()) if zero_point is None else _per_axis(node, x, zero_point).to(x.dtype)
    # Clamped first, an infinity still has a nearest integer.
    inside = torch.clamp(x / _per_axis(node, x, scale), bounds.min - zero, bounds.max - zero)
    return round_through(inside) + zero


@operator("DequantizeLinear", fixed=(1,))
def dequantize_linear(node: Node, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    scale = _per_axis(node, x, scale)
    # Integers are subtracted as such: an int32 bias may have more digits than a float holds.
    exact = x if x.is_floating_point() else x.to(torch.int32)
    if zero_point is not None:
        exact = exact - _per_axis(node, x, zero_point).to(exact.dtype)
    return exact.to(scale.dtype) * scale


def _integer(node: Node, zero_point: Tensor | None) -> torch.dtype:
    if zero_point is not None:
        return zero_point.dtype
    wanted = node.get("output_dtype", 0)
    return DTYPES.get(wanted, torch.uint8)


def _per_axis(node: Node, x: Tensor, values: Tensor) -> Tensor:
    if node.get("block_size", 0):
        raise node.unsupported("quantisation in blocks")
    return along(values, x, node.get("axis", 1))


def along(values: Tensor, like: Tensor, axis: int) -> Tensor:
    """``values``, one or one for each place along ``axis``, so that they broadcast over ``like``."""
    if values.numel() == 1:
        return values.reshape(())
    return values.reshape([-1 if place == axis % like.ndim else 1 for place in range(like.ndim)])
