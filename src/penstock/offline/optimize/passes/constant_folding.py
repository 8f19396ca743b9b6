"""Replace nodes that do not depend on the inputs by their values."""

from __future__ import annotations

from typing import cast

import numpy as np
import onnx
import onnx_ir as ir

from penstock.errors import PenstockError
from penstock.offline.optimize import graph
from penstock.offline.optimize.base import NodePass
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

_GROWTH_LIMIT_BYTES = 1 << 20
_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
_QUANTIZATION = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


class ConstantFolding(NodePass):
    """Replace nodes that have a known value by initialisers of the same name.

    Folded, in the order of the graph, so that one run folds a whole chain:

    1. Constant.
    2. Shape, if every requested dimension is known, and Gather of one known dimension from a Shape.
    3. Any other standard operator with one output whose inputs are all constant. ONNX Runtime computes the value with its
       optimisations disabled.

    Not folded:

    4. Nondeterministic operators, and QuantizeLinear nodes of weights, which engines fuse into integer kernels.
    5. Nodes with subgraphs, other domains, text, sparse tensors, sequences, and nodes that ONNX Runtime cannot run.
    6. Nodes with a result that is larger than 1 MiB and larger than all inputs together, such as a large ConstantOfShape or Expand.
       Nodes whose result has a size that shape inference cannot find.
    7. Outputs of the graph.
    """

    name = "constant_folding"

    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:  # Rule 5
        if len(node.outputs) != 1 or node.outputs[0].is_graph_output() or not graph.is_used(node.outputs[0]):
            return False  # Rule 7; unused nodes are left to dead code elimination
        result = _value_of(node, model)
        if result is not None:
            graph.replace_by_constant(node, result)
        return result is not None


def _value_of(node: ir.Node, model: ir.Model) -> Array | ir.TensorProtocol | None:
    if node.op_type == "Constant":
        return _constant(node)  # Rule 1
    if node.op_type == "Shape":
        return _shape(node)  # Rule 2
    if node.op_type == "Gather" and (dimension := _gathered_dimension(node)) is not None:
        return dimension  # Rule 2
    if node.op_type in graph.NON_DETERMINISTIC | _QUANTIZATION:
        return None  # Rule 4
    inputs = [value for value in node.inputs if value is not None]
    if inputs and all(graph.is_constant(value) for value in inputs):
        return _run(node, inputs, model)  # Rule 3
    return None


def _constant(node: ir.Node) -> Array | ir.TensorProtocol | None:
    (attribute,) = node.attributes.values()
    if attribute.name == "value":
        tensor = attribute.as_tensor()
        return None if tensor.dtype == ir.DataType.STRING else tensor
    dtype = _NUMBERS.get(attribute.name)
    return None if dtype is None else np.array(attribute.value, dtype)  # Rule 5


def _shape(node: ir.Node) -> Array | None:
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    start, end = graph.int_attribute(node, "start", 0), graph.int_attribute(node, "end", source.shape.rank())
    return _known(source.shape.dims[start:end])


def _gathered_dimension(node: ir.Node) -> Array | None:
    shape_value, index = node.inputs[0], graph.constant(node.inputs[1])
    producer = shape_value.producer() if shape_value is not None else None
    if producer is None or producer.op_type != "Shape" or producer.domain != "" or index is None or index.size != 1:
        return None
    source = producer.inputs[0]
    if source is None or source.shape is None or "start" in producer.attributes or "end" in producer.attributes:
        return None
    position = int(index.reshape(-1)[0])
    if not -source.shape.rank() <= position < source.shape.rank():
        return None
    known = _known([source.shape.dims[position]])
    return None if known is None else known.reshape(index.shape)


def _known(dims: object) -> Array | None:
    sizes = [dim for dim in cast("list[object]", dims) if isinstance(dim, int)]
    return np.array(sizes, np.int64) if len(sizes) == len(cast("list[object]", dims)) else None


def _run(node: ir.Node, inputs: list[ir.Value], model: ir.Model) -> Array | None:
    """The node's result, computed by ONNX Runtime. None if a rule excludes the node, or if ONNX Runtime cannot run it."""
    proto = _single_node_model(node, inputs, model)
    expected = _expected_bytes(proto)
    held = sum(value.const_value.nbytes for value in inputs if value.const_value is not None)
    if expected is None or expected > max(held, _GROWTH_LIMIT_BYTES):
        return None  # Rule 6
    try:
        artifact = artifact_of(proto)
        with loaded(artifact, as_written=True) as folded:
            (result,) = folded.forward({}).values()
    except PenstockError:
        return None  # Rule 5
    return None if result.dtype == DataType.BYTES.dtype else result


def _single_node_model(node: ir.Node, inputs: list[ir.Value], model: ir.Model) -> onnx.ModelProto:
    name = node.outputs[0].name
    constants = {value.name: value.const_value for value in inputs}
    initializers = [ir.to_proto(tensor) for tensor in constants.values() if tensor is not None]
    for proto, value_name in zip(initializers, constants, strict=True):
        proto.name = value_name
    body = onnx.helper.make_graph([ir.to_proto(node)], "constant", [], [onnx.ValueInfoProto(name=name)], initializers)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    return onnx.helper.make_model(body, opset_imports=opsets, ir_version=model.ir_version)


def _expected_bytes(proto: onnx.ModelProto) -> int | None:
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        output = inferred.graph.output[0].type.tensor_type
    except Exception:  # noqa: BLE001 - failed inference finds no size
        return None
    dtype = ir.DataType(output.elem_type)
    is_known = output.HasField("shape") and all(dim.HasField("dim_value") for dim in output.shape.dim)
    if not is_known or dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        return None
    return int(np.prod([float(dim.dim_value) for dim in output.shape.dim]) * dtype.itemsize)
