"""Matrix products with constant weights, and other operators put in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.errors import Unsupported
from penstock.offline.compress.ptq.placement import FloatModel, reads
from penstock.tensor import Array

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


class Product(NamedTuple):
    """``output = input · weight + bias``: a MatMul, or a Gemm that does not transpose its input."""

    node: onnx.NodeProto
    weight: Array
    """[K, N], FP32: as it is multiplied, so transposed and scaled already where the Gemm says so."""
    weight_name: str
    """Equal for equal weights, so that those used twice are written once."""
    bias: str
    """Tensor to add; empty if there is none."""

    @property
    def input(self) -> str:
        return str(self.node.input[0])

    @property
    def output(self) -> str:
        return str(self.node.output[0])


class Replacement(NamedTuple):
    """What stands in the place of a node."""

    nodes: list[onnx.NodeProto]
    tensors: list[onnx.TensorProto]


def products(model: FloatModel, least_weights: int) -> list[Product]:
    """The products whose weights are constant and at least ``least_weights`` many, in order. Raises Unsupported if there is none."""
    found = [product for node in model.nodes if (product := _product(model, node, least_weights)) is not None]
    if not found:
        raise Unsupported(
            f"the model has no MatMul or Gemm with at least {least_weights} constant FP32 weights",
            "convolutions take INT8 by calibration: quantize()",
        )
    return found


def replaced(model: FloatModel, replacements: Mapping[str, Replacement], domains: Iterable[str] = ()) -> bytes:
    """The model with other nodes in place of those named; weights that nobody reads any more are left out.

    Of new tensors of one name the first is taken. The same arguments give the same bytes.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    del graph.node[:]
    tensors: dict[str, onnx.TensorProto] = {}
    for node in model.nodes:
        replacement = replacements.get(node.name, Replacement([node], []))
        graph.node.extend(replacement.nodes)
        tensors = {tensor.name: tensor for tensor in replacement.tensors} | tensors
    graph.initializer.extend(tensors.values())
    read = {value.name for value in graph.output}.union(*map(reads, graph.node))
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    imported = {opset.domain for opset in proto.opset_import}
    proto.opset_import.extend(helper.make_opsetid(domain, 1) for domain in domains if domain not in imported)
    return bytes(proto.SerializeToString(deterministic=True))


def with_bias(product: Product, nodes: list[onnx.NodeProto], result: str) -> list[onnx.NodeProto]:
    """``nodes``, whose ``result`` is the product without bias, so that they end in the product's own output."""
    if product.bias:
        return [*nodes, helper.make_node("Add", [result, product.bias], [product.output])]
    nodes[-1].output[:] = [product.output]
    return nodes


def _product(model: FloatModel, node: onnx.NodeProto, least_weights: int) -> Product | None:
    if node.op_type not in ("MatMul", "Gemm") or node.domain not in ("", "ai.onnx"):
        return None
    tensor = model.weights.get(node.input[1])
    known = tensor is not None and model.is_float(node.input[1]) and model.is_float(node.input[0])
    if tensor is None or not known or len(tensor.dims) != 2 or np.prod(tensor.dims) < max(1, least_weights):
        return None
    weight = numpy_helper.to_array(tensor)
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    bias = node.input[2] if len(node.input) > 2 else ""
    if attributes.get("transA", 0) or (bias and attributes.get("beta", 1.0) != 1.0) or not np.isfinite(weight).all():
        return None
    transposed, alpha = attributes.get("transB", 0), attributes.get("alpha", 1.0)
    form = ("_transposed" if transposed else "") + (f"_times_{alpha:g}" if alpha != 1 else "")
    weight = (weight.T if transposed else weight) * np.float32(alpha)
    return Product(node, weight, f"{tensor.name}{form}", bias)
