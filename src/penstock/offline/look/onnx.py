"""What an ONNX file says. Weights are not read, so that external files may be missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import onnx
from google.protobuf.message import DecodeError

from penstock.artifact import Artifact
from penstock.errors import InvalidModel, Unsupported
from penstock.offline.convert.certificate import certificate_of, is_outdated
from penstock.offline.look.facts import FileFacts, TensorFacts, sorted_counts
from penstock.offline.optimize.model import optional_inputs
from penstock.tensor import DataType

_CHANGED = "the model was changed after its conversion, so its certificate does not apply"
_DEFAULT_DOMAINS = ("", "ai.onnx")
_QUANTISED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits", "QGemm"})
_QUANTISED_PARTS = ("QLinear", "Integer", "QAttention", "BlockQuantized")
_NO_WEIGHTS = {onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL, onnx.TensorProto.STRING}
"""Constants of these types are indices, shapes and texts."""
_BITS = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4}


def read(artifact: Artifact) -> FileFacts:
    """Read the file. Raises InvalidModel."""
    try:
        proto = onnx.load_model_from_string(artifact.data)
    except DecodeError:
        raise InvalidModel("the file is not an ONNX model, or it is truncated or corrupt", "export it again") from None
    graph = proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    nodes = list(_nodes(proto))
    operators = Counter(map(_operator, nodes))
    tensors = [*graph.initializer, *(each for node in nodes for each in _constants(node))]
    return FileFacts(
        tuple(map(_tensor, inputs)),
        tuple(map(_tensor, graph.output)),
        {value.name: _axes(value) for value in (*inputs, *graph.output)},
        {one.domain if one.domain not in _DEFAULT_DOMAINS else "ai.onnx": one.version for one in proto.opset_import},
        sorted_counts(operators),
        sum(math.prod(tensor.dims) for tensor in tensors if tensor.data_type not in _NO_WEIGHTS),
        sum(map(_bytes, tensors)),
        _quantised(nodes),
        certificate_of(artifact),
        tuple(_notes(proto, nodes)) + ((_CHANGED,) if is_outdated(artifact) else ()),
    )


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, including those of subgraphs and functions."""
    pending = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while pending:
        node = pending.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                pending += graph.node


def _operator(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in _DEFAULT_DOMAINS else f"{node.domain}.{node.op_type}"


def _constants(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR:
            yield attribute.t
        for graph in (attribute.g, *attribute.graphs):
            yield from graph.initializer


def _bytes(tensor: onnx.TensorProto) -> int:
    """The size of the elements in bytes; for text, an estimate."""
    bits = _BITS.get(tensor.data_type, 0)
    if not bits:
        try:
            bits = 8 * (DataType.from_onnx(tensor.data_type).itemsize or 16)
        except Unsupported:
            bits = 8
    return int(math.prod(tensor.dims)) * bits // 8


def _tensor(value: onnx.ValueInfoProto) -> TensorFacts:
    kind = value.type
    if kind.WhichOneof("value") != "tensor_type":
        return TensorFacts(value.name, _type_name(kind), None)
    shape = tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in kind.tensor_type.shape.dim)
    return TensorFacts(value.name, _type_name(kind), shape if kind.tensor_type.HasField("shape") else None)


def _type_name(kind: onnx.TypeProto) -> str:
    match kind.WhichOneof("value"):
        case "tensor_type":
            return _element_name(kind.tensor_type.elem_type)
        case "sequence_type":
            return f"seq({_nested(kind.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({_nested(kind.optional_type.elem_type)})"
        case "map_type":
            return f"map({_element_name(kind.map_type.key_type)}, {_nested(kind.map_type.value_type)})"
        case "sparse_tensor_type":
            return f"sparse({_element_name(kind.sparse_tensor_type.elem_type)})"
    return "unknown"


def _nested(kind: onnx.TypeProto) -> str:
    name = _type_name(kind)
    return f"tensor({name})" if kind.WhichOneof("value") == "tensor_type" else name


def _element_name(number: int) -> str:
    try:
        return str(DataType.from_onnx(number).value)
    except Unsupported:
        names = {value: name for name, value in onnx.TensorProto.DataType.items()}
        return str(names.get(number, f"type {number}"))


def _axes(value: onnx.ValueInfoProto) -> tuple[str, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(axis.dim_param if axis.dim_param.isprintable() else "" for axis in dims)


def _quantised(nodes: list[onnx.NodeProto]) -> str:
    found = Counter(
        node.op_type
        for node in nodes
        if node.op_type in _QUANTISED or any(part in node.op_type for part in _QUANTISED_PARTS)
    )
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


def _notes(proto: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    own = {(function.domain, function.name) for function in proto.functions}
    custom = {
        _operator(node)
        for node in nodes
        if not (node.domain in _DEFAULT_DOMAINS or node.domain.startswith(("ai.onnx", "com.microsoft")))
        and (node.domain, node.op_type) not in own
    }
    if custom:
        yield f"custom operators, which need a library of their maker: {', '.join(sorted(custom)[:8])}"
    outside = {
        entry.value
        for tensor in proto.graph.initializer
        for entry in tensor.external_data
        if tensor.data_location == onnx.TensorProto.EXTERNAL and entry.key == "location"
    }
    if outside:
        yield f"weights in other files: {', '.join(sorted(outside)[:8])}"
    if optional := optional_inputs(proto):
        yield f"inputs with a default value, which a build makes constant: {optional}"
