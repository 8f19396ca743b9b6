"""Fold an addition or multiplication of a constant per channel into the preceding Conv, ConvTranspose or Gemm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import NodePass
from penstock.offline.optimize.linear import read_linear
from penstock.tensor import Array

_FOLDED = frozenset({"Add", "Sub", "Mul", "Div"})


class BiasFolding(NodePass):
    """``y + c``, ``y - c``, ``c - y``, ``c y`` and ``y / c`` become part of the weight and bias of the node that computes ``y``.

    Folded:

    1. Add, with ``c`` on either side: ``c`` is added to the bias, which is created if it is missing. For Gemm, ``alpha`` stays and the
       bias absorbs ``beta``.
    2. Sub: ``y - c`` changes the bias; ``c - y`` also negates weight and bias.
    3. Mul by ``c`` on either side, and Div by ``c``: the factor changes weight and bias.

    Not folded:

    4. ``y`` if another node, a subgraph or the model's caller also reads it.
    5. A ``c`` that is not constant, or that does not broadcast over ``y`` per channel. For example, after a Conv, ``[C]`` and
       ``[1, W]`` broadcast along the last axis of ``y``, not along its channels. After a Gemm, ``[N, 1]`` has one number per row. A
       ``c`` of higher rank or with more channels changes the shape.
    6. ``c / y``, which is not linear; Div by zero, and any other result that is not finite.
    """

    name = "bias_folding"

    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        return node.op_type in _FOLDED and any(_fold(node, side) for side in (0, 1))


def _fold(node: ir.Node, side: int) -> bool:
    """Fold ``node`` into the producer of its input ``side``, if this producer is linear and the other input is constant."""
    source = node.inputs[side] if node.graph is not None else None
    linear = read_linear(source.producer()) if source is not None else None
    if linear is None or source is None or graph.sole_consumer(source) is not node:
        return False  # Rule 4
    array = graph.constant(node.inputs[1 - side])
    constant = linear.per_channel(array) if array is not None else None
    if constant is None or (node.op_type == "Div" and side == 1):
        return False  # Rules 5, 6
    with np.errstate(divide="ignore"):
        scale, shift = _scale_and_shift(node.op_type, constant, side)
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        return False  # Rule 6
    return linear.fold(node, scale, shift)


def _scale_and_shift(op_type: str, constant: Array, side: int) -> tuple[Array, Array]:
    ones, zeros = np.ones_like(constant), np.zeros_like(constant)
    match op_type:
        case "Add":
            return ones, constant  # Rule 1
        case "Sub":
            return (ones, -constant) if side == 0 else (-ones, constant)  # Rule 2
        case "Mul":
            return constant, zeros  # Rule 3
    return 1.0 / constant, zeros  # Rule 3
