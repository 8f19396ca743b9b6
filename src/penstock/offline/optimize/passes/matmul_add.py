"""Fuse a MatMul and the addition of a bias into one Gemm."""

from __future__ import annotations

import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import NodePass


class MatMulAdd(NodePass):
    """``x W + b`` becomes ``Gemm(x, W, b)``.

    Fused:

    1. MatMul of an ``x`` of rank 2 with a constant ``[K, N]``, then Add of a constant ``[N]`` or ``[1, N]`` on either side.

    Not fused:

    2. An ``x`` with another rank or an unknown rank, because Gemm does not accept it; integers.
    3. A MatMul with a second consumer; a ``W`` or ``b`` that is computed; a ``b`` of another shape; opsets before 11, whose Gemm
       requires ``b``.
    """

    name = "matmul_add"

    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        is_addition = node.op_type == "Add" and graph.opset(model) >= 11  # Rule 3
        return is_addition and any(_fuse(node, side) for side in (0, 1))


def _fuse(add: ir.Node, side: int) -> bool:
    product = add.inputs[side] if add.graph is not None else None
    matmul = product.producer() if product is not None else None
    if product is None or matmul is None or (matmul.domain, matmul.op_type) != ("", "MatMul"):
        return False
    if graph.sole_consumer(product) is not add:
        return False  # Rule 3
    x, weight_value = matmul.inputs
    weight, bias_value = graph.constant(weight_value), add.inputs[1 - side]
    bias = graph.constant(bias_value)
    if weight is None or weight_value is None or weight.ndim != 2 or bias is None:
        return False  # Rule 3
    if graph.rank(x) != 2 or weight_value.dtype not in graph.FLOATS:
        return False  # Rule 2
    if bias.shape not in ((weight.shape[1],), (1, weight.shape[1])):
        return False  # Rule 3
    graph.replace_pair(matmul, add, "Gemm", [x, weight_value, bias_value], [])  # Rule 1
    return True
