"""Corrections of the graphs that tf2onnx writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from penstock.offline.convert.repairs.graphs import nodes_below
from penstock.offline.convert.tensorflow import functions

_CHANGED = {"DFT", "GridSample", "GroupNormalization"}
"""Operators that change their meaning or attributes between the opset that tf2onnx writes and ``_MAX_OPSET``."""


def repair(graph: onnx.GraphProto) -> None:
    """Correct what tf2onnx writes and ONNX Runtime rejects."""
    _fold_wide_integers(graph)
    for node in nodes_below(graph):
        for attribute in node.attribute:
            if node.op_type == "Loop" and attribute.name == "body":
                for info in attribute.g.input[
                    :2
                ]:  # the number of the iteration and the condition, whose shapes must be known
                    info.type.tensor_type.shape.SetInParent()
    used = {name for node in nodes_below(graph) for name in node.input} | {one.name for one in graph.output}
    alive = [node for node in graph.node if used.intersection(node.output)]
    del graph.node[:]
    graph.node.extend(alive)
    read = {name for node in nodes_below(graph) for name in node.input} | {one.name for one in graph.output}
    kept = [one for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def quantise_rows(graph: onnx.GraphProto) -> None:
    """Quantise the activations of layers with integer weights row by row, as LiteRT does.

    tf2onnx quantises all rows together, quantises even the bias, and leaves out convolutions.
    """
    constants = {one.name: one for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    rows = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear" and _is_dynamic(node, makers)}
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output[0] in rows:
            value = makers[node.input[0]].input[0]
            is_bias = value in constants
            kind, domain = ("Identity", "") if is_bias else ("QuantisedRows", functions.DOMAIN)
            kept.append(onnx.helper.make_node(kind, [value], node.output, domain=domain))
            continue
        if (
            node.op_type == "Conv"
            and _is_dequantised(node.input[1], makers)
            and not _is_dequantised(node.input[0], makers)
        ):
            made = f"{node.output[0]}_quantised"
            kept.append(onnx.helper.make_node("QuantisedImages", [node.input[0]], [made], domain=functions.DOMAIN))
            node.input[0] = made
        if node.op_type == "MatMul" and node.input[0] in rows and node.input[1] in makers:
            kept += _unfused(node, makers[node.input[1]], constants)
        if node.op_type != "DynamicQuantizeLinear":
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _unfused(node: onnx.NodeProto, weights: onnx.NodeProto, constants: Mapping[str, Any]) -> list[onnx.NodeProto]:
    """Nodes that replace the DequantizeLinear ``weights`` of the MatMul ``node``.

    ONNX Runtime would fuse the two into MatMulNBits, which quantises the activations a second time, with other scales.
    """
    if weights.op_type != "DequantizeLinear" or weights.input[1] not in constants:
        return []
    axis = next((one.i for one in weights.attribute if one.name == "axis"), 1)
    points = onnx.numpy_helper.to_array(constants[weights.input[2]]) if len(weights.input) > 2 else np.zeros(1)
    if points.any() or axis not in (1, -1):
        return []
    made = f"{node.output[0]}_weights"
    node.input[1] = made
    return [
        onnx.helper.make_node("Cast", [weights.input[0]], [f"{made}_integers"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Mul", [f"{made}_integers", weights.input[1]], [made]),
    ]


def _is_dynamic(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    return node.input[0] in makers and makers[node.input[0]].op_type == "DynamicQuantizeLinear"


def _is_dequantised(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """True if the tensor comes from integers, except for changes of its layout."""
    while name in makers and makers[name].op_type in ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Pad"):
        name = makers[name].input[0]
    return name in makers and makers[name].op_type == "DequantizeLinear"


def _fold_wide_integers(graph: onnx.GraphProto) -> None:
    """Replace dequantised constants of 64 bits, the biases of 16-bit models, by floats: DequantizeLinear takes 32 bits at most."""
    constants = {one.name: one for one in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        if node.input[0] not in constants or constants[node.input[0]].data_type != onnx.TensorProto.INT64:
            continue
        values, scale = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[:2])
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        shape = [-1 if one == axis % values.ndim else 1 for one in range(values.ndim)] if scale.ndim else []
        floats = (values.astype(np.float64) * scale.reshape(shape)).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(floats, node.output[0]))
        graph.node.remove(node)


def raise_opset(model: onnx.ModelProto, opset: int) -> None:
    """Declare ``opset`` if all operators keep their meaning in it. Models with 16-bit quantisation are valid only then."""
    if not _CHANGED & {node.op_type for node in nodes_below(model.graph)}:
        for one in model.opset_import:
            if one.domain == "":
                one.version = max(one.version, opset)
        model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
