"""Linear layers: the function that Conv, ConvTranspose, Gemm and MatMul compute from their weight, bias and attributes.

All passes, quantisation, pruning, factorisation and training use this module. The operators compute ``y = W x + b`` for each output
channel. A subsequent ``s y + t`` per channel can be folded into the weights: ``W' = s W``, ``b' = s b + t`` (Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018, §3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.names import FreshNames
from penstock.tensor import Array

WEIGHT_INPUTS = {"Conv": (1,), "ConvTranspose": (1,), "Gemm": (1,), "MatMul": (0, 1)}
"""The linear operators, and the indices of the inputs that can be the weight. ``LinearForm`` describes a weight at index 1."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})


class LinearForm(NamedTuple):
    """How a node computes a product with its weight, which is its second input."""

    inputs: int
    """The axis of the weight over which the product sums."""
    outputs: int
    """The axis of the weight's output channels; in a ConvTranspose, the channels of one group."""
    groups: int = 1
    transposes_input: bool = False
    alpha: float = 1.0
    """Factor of the product."""
    beta: float = 1.0
    """Factor of the bias."""

    @property
    def is_plain(self) -> bool:
        """True if the node computes exactly ``W x + b``, with all channels in one group."""
        return not self.transposes_input and self.groups == 1 and self.alpha == self.beta == 1


def linear_form(op_type: str, attribute: Callable[[str, Any], Any]) -> LinearForm | None:
    """The form of a linear operator; None for other operators. ``attribute(name, default)`` reads an attribute.

    For a MatMul, the form has the axes of a weight on the right.
    """
    match op_type:
        case "Conv":
            return LinearForm(1, 0, attribute("group", 1))
        case "ConvTranspose":
            return LinearForm(0, 1, attribute("group", 1))
        case "MatMul":
            return LinearForm(0, 1)
        case "Gemm":
            inputs, outputs = (1, 0) if attribute("transB", 0) else (0, 1)
            factors = attribute("alpha", 1.0), attribute("beta", 1.0)
            return LinearForm(inputs, outputs, 1, bool(attribute("transA", 0)), *factors)
    return None


def reads_weight(node: ir.Node, index: int) -> bool:
    """True if a constant that is input ``index`` of ``node`` is the weight of a linear operator."""
    return node.domain == "" and index in WEIGHT_INPUTS.get(node.op_type, ())


def form_of(node: ir.Node) -> LinearForm | None:
    """The form of ``node``; None if it is not a linear operator."""

    def attribute(name: str, default: Any) -> Any:
        found = node.attributes.get(name)
        return default if found is None else found.value

    return linear_form(node.op_type, attribute) if node.domain == "" else None


def make_plain(node: ir.Node) -> bool:
    """Rewrite a Gemm with a constant weight as ``x W + b`` with one bias per output channel. Returns True if it changed.

    ``alpha`` becomes part of the weight, and ``beta`` of the bias. Separate nodes transpose ``x``, and add a bias that is computed or
    differs between rows. The Gemm is not changed if a folded value is not finite.
    """
    form, weight, bias_value = form_of(node), graph.constant(graph.input_of(node, 1)), graph.input_of(node, 2)
    weight_value, owner = graph.input_of(node, 1), node.graph
    if node.op_type != "Gemm" or form is None or weight is None or weight_value is None:
        return False
    if weight_value.dtype not in graph.FLOATS or not isinstance(owner, ir.Graph):
        return False
    bias = graph.constant(bias_value)
    if form.is_plain and (bias_value is None or (bias is not None and bias.shape == (weight.shape[form.outputs],))):
        return False
    per_channel = None if bias is None else _per_channel(bias, weight.shape[form.outputs])
    folded = [_scaled(array, by) for array, by in ((weight, form.alpha), (per_channel, form.beta)) if array is not None]
    if not all(map(_finite, folded)):
        return False
    fresh, nodes = FreshNames(owner), list[ir.Node]()

    def write(op_type: str, inputs: list[ir.Value | None], attributes: Sequence[ir.Attr] = ()) -> ir.Value:
        nodes.append(ir.Node("", op_type, inputs, attributes, num_outputs=1))
        nodes[-1].outputs[0].name = fresh(f"{node.outputs[0].name}_{op_type.lower()}")
        return nodes[-1].outputs[0]

    source = node.inputs[0]
    if form.transposes_input:
        source = write("Transpose", [source], [ir.AttrInt64s("perm", [1, 0])])
    inputs = [source, weight_value if form.alpha == 1 else graph.add_constant(owner, folded[0], f"{weight_value.name}")]
    if per_channel is not None and form.beta:
        inputs.append(graph.add_constant(owner, folded[1], f"{weight_value.name}_bias"))
    result = write("Gemm", inputs, [node.attributes["transB"]] if "transB" in node.attributes else [])
    if bias_value is not None and per_channel is None and form.beta:
        if form.beta != 1:
            beta = np.asarray(form.beta, weight.dtype)
            bias_value = write("Mul", [bias_value, graph.add_constant(owner, beta, f"{node.outputs[0].name}_beta")])
        write("Add", [result, bias_value])
    for each in nodes:
        each.doc_string = node.doc_string
    graph.replace_by_nodes(node, nodes)
    return True


def turn_product(node: ir.Node) -> bool:
    """Rewrite a MatMul of a constant and ``x`` as the transposed product of the transposed factors. On the right, a constant may have
    one scale per channel in integer kernels. Returns True if the node changed.
    """
    value, source, owner = node.inputs[0], node.inputs[1], node.graph
    constant, rank, result_rank = graph.constant(value), graph.rank(source), graph.rank(node.outputs[0])
    if (
        value is None
        or constant is None
        or source is None
        or graph.is_constant(source)
        or value.dtype != ir.DataType.FLOAT
    ):
        return False
    if constant.ndim < 2 or rank is None or rank < 2 or result_rank is None or not isinstance(owner, ir.Graph):
        return False
    fresh, nodes = FreshNames(owner), list[ir.Node]()

    def write(op_type: str, *inputs: ir.Value, order: int = 0) -> ir.Value:
        perm = [*range(order - 2), order - 1, order - 2]
        nodes.append(ir.Node("", op_type, inputs, [ir.AttrInt64s("perm", perm)] if order else [], num_outputs=1))
        nodes[-1].doc_string = node.doc_string
        nodes[-1].outputs[0].name = fresh(f"{node.outputs[0].name}_{op_type.lower()}")
        return nodes[-1].outputs[0]

    weight = graph.add_constant(owner, np.swapaxes(constant, -1, -2), f"{value.name}")
    write("Transpose", write("MatMul", write("Transpose", source, order=rank), weight), order=result_rank)
    graph.replace_by_nodes(node, nodes)
    return True


def _per_channel(bias: Array, channels: int) -> Array | None:
    """``bias`` with one number per channel; None if it differs between rows. The bias of a Gemm broadcasts to its result."""
    is_row = bias.size == 1 or (bias.size == channels and bias.shape[-1] == channels)
    return np.broadcast_to(bias.reshape(-1), channels) if is_row else None


def _scaled(array: Array, by: float) -> Array:
    """``by * array``, rounded to its type once."""
    with np.errstate(over="ignore"):  # the caller rejects values out of range
        return np.asarray(array.astype(np.float64) * by).astype(array.dtype)


class Linear(NamedTuple):
    """A Conv, ConvTranspose or Gemm node whose weight and bias are constants of one float type."""

    node: ir.Node
    weight: Array
    bias: Array
    """FP64, one per channel, already multiplied by the ``beta`` of a Gemm."""
    channel_view: tuple[int, ...]
    """A shape of ``weight`` with separate axes for the output channels."""
    scale_view: tuple[int, ...]
    """The shape of one number per channel that broadcasts over ``channel_view``."""

    @property
    def channels(self) -> int:
        return len(self.bias)

    def per_channel(self, array: Array) -> Array | None:
        """``array`` as FP64 with one number per channel. None unless broadcasting ``array`` over ``y`` applies exactly one number to
        each channel.
        """
        rank = self.weight.ndim
        padded = (1,) * (rank - array.ndim) + array.shape
        if len(padded) != rank or padded[1] not in (1, self.channels) or any(d != 1 for d in padded[:1] + padded[2:]):
            return None
        return np.broadcast_to(array.astype(np.float64).reshape(-1), self.channels)

    def fold(self, follower: ir.Node, scale: Array, shift: Array) -> bool:
        """Replace the node and ``follower``, its sole consumer, by one node that computes ``scale * y + shift`` (FP64, per channel).

        The folded values are computed in FP64 and rounded once to the weight's type. Other nodes that share the weights keep the old
        weights. Changes nothing and returns False if a folded weight is not finite.
        """
        scaled = self.weight.reshape(self.channel_view).astype(np.float64) * scale.reshape(self.scale_view)
        with np.errstate(over="ignore"):  # values out of range for FP16 are rejected below
            weight = scaled.reshape(self.weight.shape).astype(self.weight.dtype)
            bias = (self.bias * scale + shift).astype(self.weight.dtype)
        if not (_finite(weight) and _finite(bias)):
            return False
        owner, weight_value = self.node.graph, self.node.inputs[1]
        assert isinstance(owner, ir.Graph)
        assert weight_value is not None
        inputs = [
            self.node.inputs[0],
            graph.add_constant(owner, weight, f"{weight_value.name}"),
            graph.add_constant(owner, bias, f"{weight_value.name}_bias"),
        ]
        attributes = [attribute for name, attribute in self.node.attributes.items() if name != "beta"]
        graph.replace_pair(self.node, follower, self.node.op_type, inputs, attributes)
        return True


def read_linear(node: ir.Node | None) -> Linear | None:
    """Read ``node`` as a Linear. None for any other operator, or if the weight or bias is not constant."""
    form = None if node is None or node.op_type == "MatMul" else form_of(node)
    if node is None or form is None:
        return None
    weight, bias_input = graph.constant(graph.input_of(node, 1)), graph.input_of(node, 2)
    weight_value = node.inputs[1]
    if weight is None or weight_value is None or weight_value.dtype not in graph.FLOATS or weight.ndim < 2:
        return None
    channels = form.groups * weight.shape[1] if node.op_type == "ConvTranspose" else weight.shape[form.outputs]
    bias = np.zeros(channels)
    if bias_input is not None:
        array = graph.constant(bias_input)
        row = None if array is None else _per_channel(array, channels)
        if row is None:
            return None
        bias = row.astype(np.float64) * form.beta
    return Linear(node, weight, bias, *_views(node.op_type, form, weight.shape))


def _views(op_type: str, form: LinearForm, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``channel_view`` and ``scale_view`` of a weight."""
    if op_type == "ConvTranspose":
        # The weight is [inputs, channels / groups, ...], so the channels of all groups extend over two axes.
        view = (form.groups, shape[0] // form.groups, *shape[1:])
        return view, (form.groups, 1, shape[1], *(1 for _ in shape[2:]))
    return shape, tuple(size if axis == form.outputs else 1 for axis, size in enumerate(shape))


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())
