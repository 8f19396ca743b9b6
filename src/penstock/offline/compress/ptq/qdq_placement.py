"""QDQ placement: choose the operators that become integer, and derive the ranges that the graph implies for tensors.

Six rules hold in every placement:

1. An operator becomes integer only if its weights are constant FP32 and all its inputs and outputs are known to be FP32.
2. The operators between the last matrix product and a Softmax (scaling, masks) stay in float, and the result of the product is never
   clipped. A mask value of -10000 would take the whole range, and the Softmax depends on the order of the largest scores.
3. Outputs of the model are never clipped. Outputs of Softmax and Sigmoid have the range 0 to 1 by definition.
4. An operator other than a product becomes integer only if a path of integer operators leads from a product to it. In a normalisation
   made of separate operators, all operators from the square to the product with the root stay float, since small values matter.
5. An operator other than a product becomes integer only if an integer operator reads its result. Rounding a tensor that only float
   operators read, such as the sum before a normalisation, costs accuracy and saves nothing.
6. A ConvTranspose becomes integer only if its input is never negative, it has one group, not both strides and dilations, and explicit
   pads that are at least ``output_padding`` at each end. OpenVINO has a fast and correct kernel only for these, and ONNX Runtime has
   none. With signed activations, or with less padding on CPUs without AVX-512, the kernel of OpenVINO 2026.4 returns wrong results.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.ptq.opset import at_opset
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.model_store import remembered
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import linear_form, make_plain, turn_product
from penstock.offline.optimize.mapped import array_of, artifact_of
from penstock.offline.optimize.model import from_proto, infer_shapes, read_proto, to_proto
from penstock.offline.optimize.names import reads
from penstock.tensor import DataType

LINEAR_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators that become faster as integers even if their neighbours stay float."""

ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Activation functions that clipping to the range of the preceding operator's integers can replace."""

KEPT_FLOAT = "penstock: keep float"
"""The description of nodes that are not quantised (``keep_float.py``)."""

_WIDE_OPS = frozenset(
    {"Add", "Mul", "LeakyRelu", "Sigmoid", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool"}
    | {"Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad"}
)
"""Operators that can work on integers, so that a tensor on its way between two linear operators stays integer."""

_MOVING_OPS = frozenset({"Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"})

_SCORE_OPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Where", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze"}
)
_ROOTS = frozenset({"Sqrt", "Reciprocal", "Log"})
"""Operators whose results depend most on the smallest values of their input."""
_VARIANCE_OPS = frozenset({"Add", "Mul", "ReduceMean", "ReduceSum", "AveragePool", "GlobalAveragePool"})
_POOLS = frozenset({"Concat", "MaxPool", "AveragePool", "GlobalAveragePool"})
"""Operators whose results lie between values of their inputs."""
_ANY = Range(-np.inf, np.inf)
_FIXED = {"Softmax": Range(0.0, 1.0), "Sigmoid": Range(0.0, 1.0), "Tanh": Range(-1.0, 1.0)}


class QdqPlacement(enum.Enum):
    """The set of operators that become integer."""

    LINEAR = "linear"
    """Convolutions and products with constant weights. Results of matrix products stay float, which is more accurate."""
    ATTENTION = "attention"
    """Like ``LINEAR``, and also the products of queries and keys, with the operators that move their operands. Products with the
    results of a Softmax stay float, because rounding these costs more time than the integer product saves."""
    WIDE = "wide"
    """Like ``LINEAR``, and also additions, pooling, data movement and products of two activations. This can be faster if a model has
    many of these operators."""

    @property
    def float_outputs(self) -> list[str]:
        """Operators whose results stay float, even if an integer operator reads them."""
        return ["Gemm"] if self is QdqPlacement.WIDE else ["Gemm", "MatMul"]


class FloatModel:
    """An FP32 model prepared for quantisation: nodes have unique names, constants are initialisers, each Gemm is ``x W + b``, and
    the constant of a product is on the right.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Raises the errors of ``read_proto``. Also raises Unsupported if the model is already quantised (``in_fp32`` dequantises most
        models), or has an old opset that cannot be converted.
        """
        proto = read_proto(artifact)
        kept = {name for node in proto.graph.node if node.doc_string == KEPT_FLOAT for name in node.output}
        proto = at_opset(proto)
        _constants_to_initializers(proto.graph)
        _check_not_quantised(proto.graph)
        proto = _with_plain_products(proto)
        for number, node in enumerate(proto.graph.node):
            node.name = f"{node.op_type}_{number}"
            if not kept.isdisjoint(node.output):
                node.doc_string = KEPT_FLOAT
        # A tensor of unknown type cannot become integer.
        with contextlib.suppress(Exception):
            proto = onnx.shape_inference.infer_shapes(proto)
        self.proto, self._source = proto, artifact  # the weights may be in the artifact's files
        graph = self.proto.graph
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        constants = {tensor.name: tensor for tensor in graph.initializer}
        overridable = {value.name for value in graph.input} & constants.keys()
        self.input_names: list[str] = [value.name for value in graph.input if value.name not in overridable]
        self.output_names: list[str] = [value.name for value in graph.output]
        self.weights = {name: tensor for name, tensor in constants.items() if name not in overridable}
        values = (*graph.value_info, *graph.input, *graph.output)
        self.values = {value.name: value for value in values if value.type.tensor_type.elem_type}
        """The type of each tensor whose type is known, with the dimensions that are known."""
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self.readers = Counter(name for node in self.nodes for name in reads(node)) + Counter(self.output_names)
        """The number of nodes that read each tensor, including nodes in subgraphs. A model output counts as one more reader."""

    def artifact(self) -> Artifact:
        """The prepared model."""
        return artifact_of(self.proto)

    def is_float(self, tensor: str) -> bool:
        """True if ``tensor`` is known to be FP32."""
        if tensor in self.weights:
            return bool(self.weights[tensor].data_type == DataType.FP32.onnx)
        return tensor in self.values and bool(self.values[tensor].type.tensor_type.elem_type == DataType.FP32.onnx)

    def integer_nodes(self, placement: QdqPlacement, keep_float: Collection[str] = ()) -> list[onnx.NodeProto]:
        """The nodes that ``placement`` makes integer, in graph order; empty if there is no linear operator among them.

        Nodes named in ``keep_float`` and nodes marked with ``KEPT_FLOAT`` stay float, as do the activation functions that follow them.
        Raises InvalidArgument for unknown names.
        """
        unknown = set(keep_float) - {node.name for node in self.nodes}
        if unknown:
            raise InvalidArgument(
                f"no node of the model is called {sorted(unknown)}", "a name has the form OPERATOR_NUMBER, e.g. Conv_3"
            )
        excluded = self._scores()[0] | self._variances()
        if placement is QdqPlacement.ATTENTION:
            excluded |= self._outside_attention()
        allowed = (node for node in self.nodes if node.domain in ("", "ai.onnx") and node.name not in excluded)
        useful = self._read(self._connected(node for node in allowed if self._fits(node, placement)))
        nodes = self._with_producers(
            node for node in useful if node.name not in keep_float and node.doc_string != KEPT_FLOAT
        )
        return nodes if any(node.op_type in LINEAR_OPS for node in nodes) else []

    def activations(self, nodes: Iterable[onnx.NodeProto]) -> list[str]:
        """The FP32 inputs and outputs of ``nodes``, without weights, in order."""
        return self.tensors(name for node in nodes for name in (*node.input, *node.output))

    def tensors(self, names: Iterable[str]) -> list[str]:
        """The FP32 tensors among ``names`` that are not weights, in order."""
        return [name for name in dict.fromkeys(names) if name not in self.weights and self.is_float(name)]

    def unclippable(self) -> set[str]:
        """Tensors whose largest values must not be clipped (rules 2 and 3)."""
        _, tensors = self._scores()
        return tensors | set(self.output_names)

    def fixed_ranges(self) -> dict[str, Range]:
        """The ranges that are known without data (rule 3)."""
        return {node.output[0]: _FIXED[node.op_type] for node in self.nodes if node.op_type in _FIXED}

    def _connected(self, nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The products among ``nodes``, and the other ``nodes`` to which a path within ``nodes`` leads from a product (rule 4)."""
        computed = set[str]()
        found: list[onnx.NodeProto] = []
        for node in nodes:
            if node.op_type in LINEAR_OPS or not computed.isdisjoint(node.input):
                found.append(node)
                computed.update(filter(None, node.output))
        return self._with_producers(found)

    def _read(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The products among ``nodes``, with their activation functions, and the others whose results these read (rule 5)."""
        wanted = set[str]()
        found: list[onnx.NodeProto] = []
        for node in reversed(nodes):
            is_absorbed = node.op_type in ACTIVATIONS and self.producers[node.input[0]].op_type in LINEAR_OPS
            if node.op_type in LINEAR_OPS or is_absorbed or not wanted.isdisjoint(node.output):
                found.append(node)
                wanted.update(node.input)
        return found[::-1]

    def _with_producers(self, nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """``nodes``, in order, without activation functions whose producer is not in ``nodes``."""
        found: dict[str, onnx.NodeProto] = {}
        for node in nodes:
            if node.op_type not in ACTIVATIONS or self.producers[node.input[0]].name in found:
                found[node.name] = node
        return list(found.values())

    def _scores(self) -> tuple[set[str], set[str]]:
        """The names of the nodes and tensors from the last linear operators before a Softmax to that Softmax."""
        nodes: set[str] = set()
        tensors: set[str] = set()
        waiting = [node.input[0] for node in self.nodes if node.op_type in ("Softmax", "LogSoftmax")]
        while waiting:
            tensor = waiting.pop()
            if tensor in tensors or tensor in self.weights:
                continue
            tensors.add(tensor)
            producer = self.producers.get(tensor)
            if producer is not None and producer.op_type in _SCORE_OPS:
                nodes.add(producer.name)
                waiting += [name for name in producer.input if self.is_float(name)]
        return nodes, tensors

    def is_bias(self, node: onnx.NodeProto) -> bool:
        """True if ``node`` adds a constant to a matrix product that only ``node`` reads."""
        if node.op_type != "Add":
            return False
        products = [name for name in node.input if name not in self.weights]
        producer = self.producers.get(products[0]) if len(products) == 1 else None
        return producer is not None and producer.op_type == "MatMul" and self.readers[products[0]] == 1

    def _outside_attention(self) -> set[str]:
        """The names of the nodes that only the wide placement makes integer."""
        inside = set[str]()
        for node in self.nodes:
            if node.op_type == "MatMul" and not self.weights.keys() & set(node.input):
                paths = [self._moved(name) for name in node.input]
                if not any(origin == "Softmax" for origin, _ in paths):
                    inside |= {node.name}.union(*(names for _, names in paths))
        kept = LINEAR_OPS | ACTIVATIONS
        products = {node.name for node in self.nodes if node.op_type in kept and not self._is_of_activations(node)}
        return {node.name for node in self.nodes} - inside - products

    def _is_of_activations(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "MatMul" and self.weights.keys().isdisjoint(node.input)

    def _moved(self, tensor: str) -> tuple[str, set[str]]:
        """The operator that computes the values of ``tensor``, and the names of the nodes that move them or add their bias."""
        names = set[str]()
        while (node := self.producers.get(tensor)) is not None and (node.op_type in _MOVING_OPS or self.is_bias(node)):
            names.add(node.name)
            tensor = next(name for name in node.input if name not in self.weights)
        return (node.op_type if node is not None else "", names)

    def _variances(self) -> set[str]:
        """Names of the nodes between a square and its root, and of those that multiply by the root."""
        nodes = self._products_with_roots()
        waiting = [node.input[0] for node in self.nodes if node.op_type in _ROOTS]
        while waiting:
            producer = self.producers.get(waiting.pop())
            if producer is not None and producer.op_type in _VARIANCE_OPS and producer.name not in nodes:
                nodes.add(producer.name)
                is_square = producer.op_type == "Mul" and producer.input[0] == producer.input[1]
                waiting += [] if is_square else producer.input
        return nodes

    def _products_with_roots(self) -> set[str]:
        nodes, roots = set[str](), set[str]()
        for node in self.nodes:
            if node.op_type in _ROOTS or (node.op_type == "Div" and node.input[0] in self.weights):
                is_root = node.op_type == "Sqrt" or not roots.isdisjoint(node.input)
                roots.update(node.output if is_root else ())
            elif node.op_type == "Mul" and not roots.isdisjoint(node.input):
                nodes.add(node.name)
        return nodes

    def _fits(self, node: onnx.NodeProto, placement: QdqPlacement) -> bool:
        if not node.input or not (self.is_float(node.input[0]) and self.is_float(node.output[0])):
            return False
        if node.op_type in LINEAR_OPS:
            return self._fits_linear(node, placement)
        if node.op_type in ACTIVATIONS:
            return self._keeps_zero(node)
        return placement is not QdqPlacement.LINEAR and node.op_type in _WIDE_OPS

    def _fits_linear(self, node: onnx.NodeProto, placement: QdqPlacement) -> bool:
        factor = self.weights.get(node.input[1])
        if factor is None:
            two_activations = node.op_type == "MatMul" and node.input[0] not in self.weights
            return two_activations and placement is not QdqPlacement.LINEAR and self.is_float(node.input[1])
        if node.input[0] in self.weights:
            return False
        if node.op_type == "MatMul":
            return len(factor.dims) == 2 or (len(factor.dims) > 2 and factor.dims[-1] > 1)
        form = linear_form(node.op_type, attributes_of(node).get)
        is_product = node.op_type == "Conv" or (form is not None and form.is_plain)
        is_fast = node.op_type != "ConvTranspose" or self._fits_transposed(node)
        return is_product and is_fast and self._fits_bias(node, factor)

    def _fits_transposed(self, node: onnx.NodeProto) -> bool:
        """True if a ConvTranspose fulfils rule 6, apart from its groups."""
        given = attributes_of(node)
        more, pads = given.get("output_padding", []), given.get("pads", [])
        is_explicit = given.get("auto_pad", b"NOTSET") == b"NOTSET" and "output_shape" not in given
        is_padded = not any(more) or (bool(pads) and all(map(int.__le__, more, pads[len(pads) // 2 :])))
        steps = (max(given.get(name, [1])) for name in ("strides", "dilations"))
        return is_explicit and is_padded and min(steps) == 1 and self._is_never_negative(node.input[0])

    def _is_never_negative(self, tensor: str) -> bool:
        waiting, seen = [tensor], {tensor}
        while waiting:
            node = self.producers.get(waiting.pop())
            if node is None or node.domain not in ("", "ai.onnx"):
                return False
            if node.op_type in _MOVING_OPS | _POOLS:
                sources = set(node.input if node.op_type == "Concat" else node.input[:1]) - seen
                waiting += sources
                seen |= sources
            elif not (self.bounds(node)[0] if node.op_type in ACTIVATIONS else _FIXED.get(node.op_type, _ANY).low) >= 0:
                return False
        return True

    def _fits_bias(self, node: onnx.NodeProto, factor: onnx.TensorProto) -> bool:
        """True if the bias is constant with one value per channel. It becomes INT32 with a scale for each output channel."""
        if len(node.input) < 3 or not node.input[2]:
            return True
        channels = factor.dims[output_axis(node)]
        bias = self.weights.get(node.input[2])
        return bias is not None and list(bias.dims) == [channels]

    def _keeps_zero(self, node: onnx.NodeProto) -> bool:
        """True if the activation maps zero to zero. Otherwise an integer range, which always contains zero, cannot replace it."""
        low, high = self.bounds(node)
        return low <= 0 <= high

    def bounds(self, node: onnx.NodeProto) -> tuple[float, float]:
        """The smallest and largest value of a Relu or Clip; NaN if it is not constant."""
        if node.op_type == "Relu":
            return 0.0, np.inf
        found = {attribute.name: attribute.f for attribute in node.attribute}
        for name, place in (("min", 1), ("max", 2)):
            if len(node.input) > place and node.input[place]:
                bound = self.weights.get(node.input[place])
                found[name] = np.nan if bound is None else float(array_of(bound).reshape(()))
        return found.get("min", -np.inf), found.get("max", np.inf)


def float_model(artifact: Artifact) -> FloatModel:
    """``FloatModel(artifact)``, computed once per build. Raises the errors of ``FloatModel``."""
    key = artifact.digest, artifact.path
    return remembered("float model", key, lambda: FloatModel(artifact), 2 * artifact.size_bytes)


def output_axis(node: onnx.NodeProto) -> int:
    """The axis of the output channels in a product's weight, if the weight is not a stack of matrices."""
    form = linear_form(node.op_type, attributes_of(node).get)
    assert form is not None
    return form.outputs


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def nothing_to_quantise() -> Unsupported:
    """The error for a model in which no operator can become integer."""
    return Unsupported(
        "the model has no operator to quantise",
        "INT8 needs Conv, Gemm, MatMul, or a ConvTranspose of values that are never negative, with constant FP32 weights; the wide "
        "placement also quantises a MatMul of two activations",
    )


def _check_not_quantised(graph: onnx.GraphProto) -> None:
    """Raise Unsupported if the model dequantises a constant, or a tensor that it quantised."""
    known = {tensor.name for tensor in graph.initializer}
    known.update(node.output[0] for node in graph.node if node.op_type == "QuantizeLinear")
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in known:
            raise Unsupported(
                f"the model is already quantised, and tensor '{node.output[0]}' cannot be dequantised",
                "give the float model",
            )


def _with_plain_products(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with each Gemm written as ``x W + b``, and with the constant of each MatMul on the right."""
    model = from_proto(proto)
    if any(graph.is_constant(node.inputs[0]) for node in graph.plain_nodes(model) if node.op_type == "MatMul"):
        model = infer_shapes(proto)
    changed = [
        make_plain(node) if node.op_type == "Gemm" else turn_product(node)
        for node in graph.plain_nodes(model)
        if node.op_type in ("Gemm", "MatMul")
    ]
    return to_proto(model) if any(changed) else proto


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Replace Constant nodes by initialisers, since ONNX Runtime's quantiser reads weights only from initialisers.

    ``onnx.checker`` has already checked that names are unique.
    """
    kept = []
    for node in graph.node:
        tensors = [attribute.t for attribute in node.attribute if attribute.name == "value"]
        if node.op_type == "Constant" and tensors and node.output[0] not in {value.name for value in graph.output}:
            tensor = graph.initializer.add()
            tensor.CopyFrom(tensors[0])
            tensor.name = node.output[0]
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
