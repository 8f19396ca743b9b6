"""Pairs of linear layers whose channels meet: output channel c of one is all that reaches input channel c of the other.

Such channels may be reordered or taken away in both at once, without a word to the rest of the graph. The matcher is
strict; a pair that it does not see is left alone:

- Both are Conv or ConvTranspose of one group, Gemm without scaling or transposed input, or MatMul by a matrix and the Add of
  its bias; weights and biases are constants that nothing else reads.
- Between them every operator treats each channel alone, and nothing else reads what is between: elementwise operators of one
  input, or of several that come from the same layer, or with one number; after convolutions also pooling, and at the end
  Flatten, or a Reshape that does the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.offline.compress.pruning.magnitude import write_weights
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.tensor import Array

_POOLING = frozenset({"MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"})
# fmt: off
_ELEMENTWISE = frozenset({
    "Abs", "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Max", "Min", "Mish", "Mul", "Neg", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sub", "Tanh", "ThresholdedRelu",
})
# fmt: on
_CONVOLUTIONS = ("Conv", "ConvTranspose")


class PairedLayer(NamedTuple):
    """One linear operator with constant weights, and the Add of its bias if it is a MatMul."""

    node: ir.Node
    weight: ir.Value
    bias: ir.Value | None
    output: ir.Value
    in_axis: int
    out_axis: int

    @property
    def is_convolution(self) -> bool:
        return self.node.op_type in _CONVOLUTIONS

    def weights(self) -> Array:
        """The weight as [out channels, in channels, positions]."""
        array = array_of(self.weight)
        ordered = np.moveaxis(array, (self.out_axis, self.in_axis), (0, 1))
        return ordered.reshape(*ordered.shape[:2], -1)


class Pair(NamedTuple):
    """Two layers and the operators between them, in order of the graph."""

    first: PairedLayer
    second: PairedLayer
    between: list[ir.Node]
    flatten: ir.Node | None
    """The last step between a convolution and a matrix; it makes ``repeat`` input channels of each."""
    repeat: int

    def select(self, model: ir.Model, channels: Array) -> None:
        """Keep of the channels between those numbered, in that order."""
        columns = (channels[:, None] * self.repeat + np.arange(self.repeat)).reshape(-1)
        edits = {self.first.weight: (channels, self.first.out_axis), self.second.weight: (columns, self.second.in_axis)}
        if self.first.bias is not None:
            edits[self.first.bias] = (channels, -1)
        write_weights(model, {str(value.name): np.take(array_of(value), *edit) for value, edit in edits.items()})
        axis = 1 if self.first.is_convolution else -1
        for node in [self.first.node, *self.between]:
            _resize(node.outputs[0], axis, len(channels))
        _resize(self.first.output, axis, len(channels))
        if self.flatten is not None:
            _resize(self.flatten.outputs[0], -1, len(columns))
        if self.flatten is not None and self.flatten.op_type == "Reshape":
            batch, width = (int(size) for size in array_of(self.flatten.inputs[1]))
            target = np.array([batch, width if width == -1 else len(columns)], np.int64)
            self.flatten.replace_input_with(1, graph.add_constant(model.graph, target, "shape"))


def array_of(value: ir.Value | None) -> Array:
    """The array of a value that is known to be constant."""
    array = graph.constant(value)
    assert array is not None
    return array


def find_pairs(model: ir.Model) -> list[Pair]:
    """Every pair of ``model``'s top graph, in order of their first layers."""
    layers = {node: layer for node in graph.plain_nodes(model) if (layer := _layer(node)) is not None}
    return [pair for layer in layers.values() if (pair := _pair(layer, layers, model)) is not None]


def _layer(node: ir.Node) -> PairedLayer | None:
    weight = graph.input_of(node, 1)
    array = graph.constant(weight) if weight is not None and _is_own(weight) else None
    if weight is None or array is None or array.ndim < 2 or weight.dtype not in graph.FLOATS:
        return None
    form = form_of(node)
    if form is None or not form.is_plain or (node.op_type == "MatMul" and array.ndim != 2):
        return None
    bias = graph.input_of(node, 2)
    if bias is not None and not _is_bias(bias, array.shape[form.outputs]):
        return None
    layer = PairedLayer(node, weight, bias, node.outputs[0], form.inputs, form.outputs)
    return _with_bias(layer) if node.op_type == "MatMul" else layer


def _with_bias(layer: PairedLayer) -> PairedLayer:
    add = graph.sole_consumer(layer.output)
    if add is None or add.op_type != "Add" or add.domain != "":
        return layer
    for value in add.inputs:
        if value is not None and value is not layer.output and _is_bias(value, layer.weights().shape[0]):
            return layer._replace(bias=value, output=add.outputs[0])
    return layer


def _pair(first: PairedLayer, layers: dict[ir.Node, PairedLayer], model: ir.Model) -> Pair | None:
    between, ends = _reach(first, layers)
    if ends is None or len(ends) != 1:
        return None
    ((node, value),) = ends
    flatten = None
    if first.is_convolution and _is_flatten(node, value):
        if node.outputs[0].is_graph_output() or len(node.outputs[0].uses()) != 1:
            return None
        flatten, value = node, node.outputs[0]
        (use,) = value.uses()
        node = use.node
    second = layers.get(node)
    if second is None or node.inputs[0] is not value or second.is_convolution != (first.is_convolution and not flatten):
        return None
    channels, columns = first.weights().shape[0], second.weights().shape[1]
    if columns % channels or (flatten is None and columns != channels):
        return None
    ordered = [node for node in model.graph if node in between]
    return Pair(first, second, ordered, flatten, columns // channels)


def _reach(
    first: PairedLayer, layers: dict[ir.Node, PairedLayer]
) -> tuple[set[ir.Node], list[tuple[ir.Node, ir.Value]] | None]:
    """The operators between, and the uses at which they end; None for these if a channel's way cannot be followed."""
    values, between, ends = [first.output], set[ir.Node](), []
    for value in values:
        if value.is_graph_output():
            return between, None
        for use in value.uses():
            node = use.node
            if node.graph is not first.node.graph or graph.has_subgraph(node):
                return between, None
            if node in layers or not _is_channelwise(node, first):
                ends.append((node, value))
            elif node not in between:
                between.add(node)
                values.append(node.outputs[0])
    known = {*values, None}
    for node in between:
        if any(value not in known and not _is_number(value) for value in node.inputs):
            return between, None
    return between, ends


def _is_channelwise(node: ir.Node, first: PairedLayer) -> bool:
    if node.domain != "" or sum(graph.is_used(output) for output in node.outputs) != 1 or len(node.outputs) != 1:
        return False
    if node.op_type in _POOLING:
        # An average that counts its padding differs at the border, where constants would not be constant.
        padded = graph.int_attribute(node, "count_include_pad", 0) or graph.int_attribute(node, "ceil_mode", 0)
        return first.is_convolution and not (node.op_type == "AveragePool" and padded)
    return node.op_type in _ELEMENTWISE


def _is_flatten(node: ir.Node, value: ir.Value) -> bool:
    if node.domain != "" or node.inputs[0] is not value:
        return False
    if node.op_type == "Flatten":
        return graph.int_attribute(node, "axis", 1) == 1
    shape = graph.constant(graph.input_of(node, 1)) if node.op_type == "Reshape" else None
    if shape is None or shape.shape != (2,) or graph.int_attribute(node, "allowzero", 0):
        return False
    # Zero takes the batch over; -1 is the batch only if the other number is all that one sample has.
    size = _sample_size(value)
    return bool(shape[0] == 0 or (shape[0] == -1 and shape[1] == size))


def _sample_size(value: ir.Value) -> int | None:
    """Elements of ``value`` along all axes but the first, if known."""
    dims = [] if value.shape is None else list(value.shape.dims)[1:]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return math.prod(sizes) if dims and len(sizes) == len(dims) else None


def _resize(value: ir.Value, axis: int, size: int) -> None:
    if value.shape is not None:
        dims = list(value.shape.dims)
        dims[axis] = size
        value.shape = ir.Shape(dims)


def _is_own(value: ir.Value) -> bool:
    return graph.is_constant(value) and len(value.uses()) == 1 and not value.is_graph_output()


def _is_bias(value: ir.Value, channels: int) -> bool:
    array = graph.constant(value)
    return array is not None and _is_own(value) and array.ndim > 0 and array.size == channels == array.shape[-1]


def _is_number(value: ir.Value | None) -> bool:
    array = graph.constant(value)
    return array is not None and array.size == 1 and array.ndim <= 1
