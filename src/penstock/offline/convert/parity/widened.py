"""Rewrites a node of an ONNX graph so that it computes in double precision."""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from penstock.offline.optimize.mapped import array_of, tensor_of
from penstock.tensor import Array

NARROW = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""Element types that become double."""
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type", "output_datatype"})
_NUMBERS = frozenset({"value_float", "value_floats"})


def widen_array(array: Array) -> Array:
    """``array`` as float64 if its elements are floats of another type."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return array.astype(np.float64) if is_float and array.dtype != np.float64 else array


def widened(node: NodeProto, *, is_inner: bool = False) -> NodeProto:
    """A copy of ``node`` that makes float64 where ``node`` makes a narrower float. A cast to FP16 or BF16 still rounds."""
    made = NodeProto()
    made.CopyFrom(node)
    rounds = made.op_type == "Cast" and not is_inner
    if made.op_type == "Constant":
        for attribute in made.attribute:
            if attribute.name in _NUMBERS:
                _as_tensor(attribute)
    for attribute in made.attribute:
        if (
            attribute.name in _TYPE_ATTRIBUTES
            and attribute.i in NARROW
            and not (rounds and attribute.i != TensorProto.FLOAT)
        ):
            attribute.i = TensorProto.DOUBLE
        elif attribute.HasField("t"):
            _widen_tensor(attribute.t)
        elif attribute.HasField("tp"):
            _widen_type(attribute.tp)
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            _widen_graph(graph)
    return made


def _widen_graph(graph: GraphProto) -> None:
    nodes = [widened(node, is_inner=True) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            _widen_value(value)


def _widen_value(value: ValueInfoProto) -> None:
    _widen_type(value.type)


def _widen_type(kind: TypeProto) -> None:
    match kind.WhichOneof("value"):
        case "tensor_type":
            if kind.tensor_type.elem_type in NARROW:
                kind.tensor_type.elem_type = TensorProto.DOUBLE
        case "sequence_type":
            _widen_type(kind.sequence_type.elem_type)
        case "optional_type":
            _widen_type(kind.optional_type.elem_type)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in NARROW:
        tensor.CopyFrom(tensor_of(array_of(tensor).astype(np.float64), tensor.name))


def _as_tensor(attribute: AttributeProto) -> None:
    array = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), np.float64)
    attribute.Clear()
    attribute.name, attribute.type = "value", AttributeProto.TENSOR
    attribute.t.CopyFrom(tensor_of(array, ""))
