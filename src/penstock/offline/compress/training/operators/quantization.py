"""QuantizeLinear and DequantizeLinear with straight-through gradients (Bengio, Léonard and Courville 2013).

Rounding follows ONNX Runtime: ``x / scale`` is clamped and rounded half to even, then the zero point is added. Between the two
operators, a quantised tensor is a float tensor that holds integers, because torch only differentiates floats.

For ``y = dequantize(quantize(x, s), s)``, the gradients are as in Esser et al., "Learned Step Size Quantization" (2020), eq. 3. The
gradient with respect to ``x`` is 1 inside the range and 0 outside. The gradient with respect to ``s`` is ``round(x/s) - x/s`` inside,
and the clamped integer minus the zero point outside. ``scaled_gradient`` multiplies the gradient of ``s`` by the factor of §2.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.offline.compress.training.operators.elementwise import DTYPES
from penstock.offline.compress.training.operators.registry import Node, operator
from penstock.offline.compress.training.torch import Tensor, torch


def round_through(x: Tensor) -> Tensor:
    """Round half to even, with the gradient of the identity."""
    return x + (torch.round(x) - x).detach()


def scaled_gradient(elements: int, largest: int) -> Callable[[Tensor], Tensor]:
    """A weight hook for the scale of ``elements`` values. It multiplies the scale's gradient by ``1 / sqrt(elements * largest)``."""
    factor = 1 / math.sqrt(elements * largest)
    return lambda scale: scale.detach() + (scale - scale.detach()) * factor


@operator("QuantizeLinear", fixed=(1,))
def quantize_linear(node: Node, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    wanted = DTYPES.get(node.get("output_dtype", 0), torch.uint8)
    bounds = torch.iinfo(wanted if zero_point is None else zero_point.dtype)
    zero = x.new_zeros(()) if zero_point is None else _per_axis(node, x, zero_point).to(x.dtype)
    # Clamp before rounding, so that infinities become integers.
    inside = torch.clamp(x / _per_axis(node, x, scale), bounds.min - zero, bounds.max - zero)
    return round_through(inside) + zero


@operator("DequantizeLinear", fixed=(1,))
def dequantize_linear(node: Node, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    scale = _per_axis(node, x, scale)
    # Subtract as integers: an int32 bias may have more digits than a float.
    exact = x if x.is_floating_point() else x.to(torch.int32)
    if zero_point is not None:
        exact = exact - _per_axis(node, x, zero_point).to(exact.dtype)
    return exact.to(scale.dtype) * scale


def _per_axis(node: Node, x: Tensor, values: Tensor) -> Tensor:
    if node.get("block_size", 0):
        raise node.unsupported("quantisation in blocks")
    return along(values, x, node.get("axis", 1))


def along(values: Tensor, like: Tensor, axis: int) -> Tensor:
    """Reshape ``values``, a single value or one value per position along ``axis``, to broadcast over ``like``."""
    if values.numel() == 1:
        return values.reshape(())
    return values.reshape([-1 if place == axis % like.ndim else 1 for place in range(like.ndim)])
