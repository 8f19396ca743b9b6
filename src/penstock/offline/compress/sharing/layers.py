"""Find the tensors of a model that can be clustered, and the kind of layer that uses each of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.errors import InvalidConfig, InvalidModel, Unsupported
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import CONVOLUTIONS, WEIGHT_INPUTS, reads_weight
from penstock.tensor import Array

Kind = Literal["conv", "fc", "bias", "other"]

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)
_MIN_BIAS = 16


class SharedTensor(NamedTuple):
    """A constant tensor that can be clustered."""

    kind: Kind
    array: Array
    """FP32, FP16, or the 8-bit integers that DequantizeLinear reads."""
    zero: int
    """The stored value that represents zero: for integers, the zero point."""


def find_layers(model: ir.Model, named: frozenset[str] = frozenset()) -> dict[str, SharedTensor]:
    """The weights and biases of Conv, ConvTranspose, Gemm and MatMul, and the tensors ``named``, as floats or as integers that
    DequantizeLinear reads.

    A tensor that several nodes read appears once, as "conv" if any of these nodes is a convolution. Raises Unsupported if there is no
    weight, InvalidConfig if a named tensor is missing, InvalidModel if a tensor has NaN or infinity.
    """
    found = {}
    for name, value in model.graph.initializers.items():
        kind, zero = _kind(value)
        if (kind is None and name not in named) or value.dtype not in (*graph.FLOATS, *_INTEGERS):
            continue
        array = graph.constant(value)
        if array is None or array.dtype not in (np.float32, np.float16, np.int8, np.uint8) or not array.size:
            continue
        if not np.isfinite(array).all():
            raise InvalidModel(f"weight '{name}' contains NaN or infinity", "train or export the model again")
        found[name] = SharedTensor(kind or "other", array, zero)
    if unknown := sorted(named - found.keys()):
        raise InvalidConfig(f"no tensors that can be clustered are called {unknown}", f"choose from {sorted(found)}")
    if not any(layer.kind != "bias" for layer in found.values()):
        raise Unsupported(
            "the model has no Conv, Gemm or MatMul with constant weights, so there is nothing to share",
            "use the model without weight sharing",
        )
    return found


def _kind(value: ir.Value) -> tuple[Kind | None, int]:
    """The kind of layer that reads ``value``, or None if it is not a weight; and its zero point."""
    kinds: set[Kind] = set()
    zero = 0
    for node, index in value.uses():
        if node.op_type == "DequantizeLinear" and index == 0:
            point = graph.constant(graph.input_of(node, 2))
            zero = int(point.reshape(-1)[0]) if point is not None and point.size else 0
            kinds |= {
                kind for use in node.outputs[0].uses() if (kind := _operand(use.node, use.idx, False)) in ("conv", "fc")
            }
        elif value.dtype in graph.FLOATS and (operand := _operand(node, index, _is_bias(value))):
            kinds.add(operand)
    order: tuple[Kind, ...] = ("conv", "fc", "bias")
    return next((kind for kind in order if kind in kinds), None), zero


def _operand(node: ir.Node, index: int, may_be_bias: bool) -> Kind | None:
    if reads_weight(node, index):
        return "conv" if node.op_type in CONVOLUTIONS else "fc"
    is_bias = may_be_bias and (node.op_type == "Add" or (node.op_type in WEIGHT_INPUTS and index == 2))
    return "bias" if is_bias and node.domain == "" else None


def _is_bias(value: ir.Value) -> bool:
    shape = graph.static_shape(value)
    return shape is not None and len(shape) == 1 and shape[0] >= _MIN_BIAS
