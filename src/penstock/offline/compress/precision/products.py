"""Matrix products with constant weights, and their replacement by other operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.compress.ptq.qdq_placement import KEPT_FLOAT, LINEAR_OPS, FloatModel, float_model
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import CONVOLUTIONS, form_of
from penstock.offline.optimize.model import from_proto, to_artifact
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.tensor import Array

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


class Product(NamedTuple):
    """``input · weight + bias``: a MatMul, or a Gemm that does not transpose its input."""

    node: ir.Node
    weight: Array
    """[K, N], FP32, with the transposition and scaling of a Gemm applied."""
    weight_name: str
    """The name under which the weight is stored. Equal weights have the same name, so that each is written once."""

    @property
    def input(self) -> ir.Value:
        """The current input. The value changes when the product that computes it is replaced."""
        source = self.node.inputs[0]
        assert source is not None
        return source

    @property
    def bias(self) -> ir.Value | None:
        return graph.input_of(self.node, 2)


class ProductModel:
    """An FP32 model whose large products can be replaced one by one."""

    def __init__(self, artifact: Artifact, least_weights: int) -> None:
        """Raises the errors of ``FloatModel``, and Unsupported if no product has at least ``least_weights`` constant weights."""
        self._model = from_proto(FloatModel(artifact).proto)
        found = (_product(node, least_weights) for node in graph.plain_nodes(self._model))
        self.products = [product for product in found if product is not None]
        """The products, in graph order."""
        if not self.products:
            raise Unsupported(
                f"the model has no MatMul or Gemm with at least {least_weights} constant FP32 weights",
                "to quantise smaller products and convolutions, use calibrated INT8: penstock quantize --calibrate",
            )
        self._constants: dict[str, ir.Value] = {}

    def constant(self, array: Array, name: str) -> ir.Value:
        """An initialiser with the value ``array``. Calls with the same ``name`` return the same initialiser."""
        if name not in self._constants:
            self._constants[name] = graph.add_constant(self._model.graph, array, name)
        return self._constants[name]

    def replace(self, product: Product, nodes: Sequence[ir.Node]) -> None:
        """Replace the product by ``nodes``, the last of which computes the product without its bias."""
        bias = [] if product.bias is None else [node("Add", nodes[-1].outputs[0], product.bias)]
        graph.replace_by_nodes(product.node, [*nodes, *bias])

    def write(self, *domains: str) -> Artifact:
        """The bytes of the model without unused weights, with imports of ``domains``. They are reproducible."""
        DeadCode().call(self._model)
        for domain in domains:
            self._model.opset_imports.setdefault(domain, 1)
        return to_artifact(self._model)


def share_of_products(artifact: Artifact, *, recurrent: bool = False) -> float:
    """The fraction of the weights of all linear operators (and LSTM, if ``recurrent``) that are not of convolutions; 0 if there are
    no weights.
    """
    model = float_model(artifact)
    sizes = Counter[str]()
    for each in model.nodes:
        places = (1, 2) if recurrent and each.op_type == "LSTM" else (1,) if each.op_type in LINEAR_OPS else ()
        weights = (model.weights.get(each.input[place]) for place in places)
        sizes[each.op_type] += sum(prod(weight.dims) for weight in weights if weight is not None)
    return 1 - sum(sizes[name] for name in CONVOLUTIONS) / sizes.total() if sizes.total() else 0.0


def node(op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: int) -> ir.Node:
    """A node of the standard operators."""
    return ir.Node("", op_type, inputs, [ir.AttrInt64(*one) for one in attributes.items()], num_outputs=outputs)


def _product(node: ir.Node, least_weights: int) -> Product | None:
    source, value, bias = (graph.input_of(node, index) for index in range(3))
    weight = graph.constant(value)
    form = form_of(node)
    if form is None or node.op_type not in ("MatMul", "Gemm") or source is None or value is None or weight is None:
        return None
    if any(tensor.dtype != ir.DataType.FLOAT for tensor in (source, value)):
        return None
    if weight.ndim != 2 or weight.size < max(1, least_weights) or not np.isfinite(weight).all():
        return None
    if node.doc_string == KEPT_FLOAT or form.transposes_input or (bias is not None and form.beta != 1):
        return None
    name = f"{value.name}{'_transposed' if form.inputs else ''}{f'_times_{form.alpha:g}' if form.alpha != 1 else ''}"
    return Product(node, np.moveaxis(weight, form.inputs, 0) * np.float32(form.alpha), name)
