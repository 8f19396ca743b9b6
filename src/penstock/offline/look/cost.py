"""The cost of one call of an ONNX model, and the part of it that INT8 would compute.

Both follow from the shapes of all tensors, which ONNX shape inference finds from the shapes of the inputs. Large weights are removed
first, because only their shapes matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import onnx

from penstock.artifact import Artifact
from penstock.errors import PenstockError, Unsupported
from penstock.offline.compress.fp32.fp32 import in_fp32
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, QdqPlacement, float_model, nothing_to_quantise
from penstock.offline.look.facts import CostFacts, elements
from penstock.offline.optimize.passes.constant_inputs import with_constant_inputs
from penstock.tensor import DataType

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_WORKING = LINEAR_OPS | _RECURRENT
_SMALL = 1024
"""Maximum number of elements of a constant whose values may determine shapes."""
_MOST = 0.9
"""Share of the tensors whose shapes must be known."""

_Sizes = Mapping[str, tuple[tuple[int, ...], int]]
"""The shape and the bytes of one element of each tensor whose shape is known."""


def cost(artifact: Artifact, shapes: Mapping[str, Sequence[int]]) -> CostFacts:
    """The cost of one call with inputs of ``shapes``. Raises InvalidModel."""
    integer, share, obstacle = _integer(artifact)
    proto = onnx.load_model_from_string(artifact.data)
    nodes = list(proto.graph.node)
    linear = [node for node in nodes if node.op_type in LINEAR_OPS]
    sizes = _sizes(proto, shapes) if shapes else {}
    work = _work(nodes, sizes)
    done = sum(work.get(name, 0) for name in integer)
    total = sum(work.values()) if all(_key(node) in work for node in nodes if node.op_type in _WORKING) else 0
    return CostFacts(
        _peak(nodes, proto.graph, sizes),
        total or None,
        len(linear),
        len(integer),
        share,
        done / total if total else None,
        obstacle,
    )


def _integer(artifact: Artifact) -> tuple[Collection[str], float, str]:
    """The outputs of the linear operators that INT8 would compute, their share of the weights, and why there are none."""
    try:
        model = float_model(in_fp32(with_constant_inputs(artifact)))
        nodes = [node for node in model.integer_nodes(QdqPlacement.LINEAR) if node.op_type in LINEAR_OPS]
        if not nodes:
            raise nothing_to_quantise()
    except PenstockError as error:
        return (), 0.0, error.message
    except Exception as error:  # noqa: BLE001 - onnx raises many kinds for unusual models
        return (), 0.0, f"the model cannot be examined: {type(error).__name__}: {str(error)[:200]}"
    held = {name for node in nodes for name in node.input if name in model.weights}
    sizes = {name: math.prod(tensor.dims) for name, tensor in model.weights.items() if model.is_float(name)}
    share = sum(sizes.get(name, 0) for name in held) / (sum(sizes.values()) or 1)
    given = {name for node in onnx.load_model_from_string(artifact.data).graph.node for name in node.output}
    return {_in_original(node.output[0], model.nodes, given) for node in nodes}, share, ""


def _in_original(name: str, nodes: Sequence[onnx.NodeProto], given: Collection[str]) -> str:
    """The output of the original in whose place ``name`` is computed. For example, a Transpose may follow a product."""
    while name not in given and (reader := next((node for node in nodes if name in node.input), None)) is not None:
        name = reader.output[0]
    return name


def _sizes(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> _Sizes:
    """The shapes of all tensors for inputs of ``shapes``. Changes ``proto``."""
    graph = proto.graph
    small = [tensor for tensor in graph.initializer if math.prod(tensor.dims) <= _SMALL]
    large = [onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in graph.initializer]
    del graph.initializer[:]
    graph.initializer.extend(small)
    graph.value_info.extend(value for value in large if math.prod(_dims(value) or ()) > _SMALL)
    for value in graph.input:
        if value.name in shapes:
            del value.type.tensor_type.shape.dim[:]
            for size in shapes[value.name]:
                value.type.tensor_type.shape.dim.add().dim_value = size
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # noqa: BLE001 - shapes remain unknown
        return {}
    found = {}
    for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = _dims(value)
        if dims is not None:
            found[value.name] = dims, _itemsize(value.type.tensor_type.elem_type)
    return {one.name: (tuple(one.dims), _itemsize(one.data_type)) for one in small} | found


def _dims(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    kind = value.type.tensor_type
    if not kind.HasField("shape") or any(not dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)


def _itemsize(number: int) -> int:
    try:
        return DataType.from_onnx(number).itemsize
    except Unsupported:
        return 1


def _peak(nodes: Sequence[onnx.NodeProto], graph: onnx.GraphProto, sizes: _Sizes) -> int | None:
    """The largest number of bytes of inputs and results that exist at the same time; None if too many shapes are unknown."""
    results = {name for node in nodes if node.op_type != "Constant" for name in node.output if name}
    results |= {value.name for value in graph.input}
    known = {name: elements(sizes[name][0]) * sizes[name][1] for name in results if name in sizes}
    if not results or len(known) < _MOST * len(results):
        return None
    last = {name: place for place, node in enumerate(nodes) for name in node.input}
    last |= {value.name: len(nodes) for value in graph.output}
    live = peak = sum(known.get(value.name, 0) for value in graph.input)
    for place, node in enumerate(nodes):
        live += sum(known.get(name, 0) for name in node.output)
        peak = max(peak, live)
        ended = {name for name in (*node.input, *node.output) if last.get(name, place) == place}
        live -= sum(known.get(name, 0) for name in ended)
    return peak


def _work(nodes: Sequence[onnx.NodeProto], sizes: _Sizes) -> dict[str, int]:
    """The multiply-add operations by ``_key``, of linear and recurrent operators whose shapes are known."""
    found = {}
    for node in nodes:
        needed = (*node.input[:2], _key(node))
        if node.op_type in _WORKING and all(name in sizes for name in needed):
            found[_key(node)] = _operations(node, sizes)
    return found


def _key(node: onnx.NodeProto) -> str:
    """The name of the first output that exists."""
    return next(filter(None, node.output), "")


def _operations(node: onnx.NodeProto, sizes: _Sizes) -> int:
    source, weight, result = (sizes[name][0] for name in (*node.input[:2], _key(node)))
    if node.op_type in _RECURRENT:
        again = [elements(sizes[name][0]) for name in node.input[2:3] if name in sizes]
        return math.prod(source[:2]) * (elements(weight) + sum(again))
    if node.op_type == "Conv":
        return elements(result) * math.prod(weight[1:])
    if node.op_type == "ConvTranspose":
        return elements(source) * math.prod(weight[1:])
    transposed = node.op_type == "Gemm" and any(each.name == "transA" and each.i for each in node.attribute)
    return elements(result) * (source[0 if transposed else -1] if source else 1)
