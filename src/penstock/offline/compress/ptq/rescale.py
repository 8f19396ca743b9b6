"""Rescale channels of a tensor inside a model without changing the model's function.

A tensor x can be divided by positive numbers s, one per channel, if three conditions hold. Its producer can be divided by s. The
weights of all its consumers can be multiplied by s. Every operator between them is positively homogeneous in each channel: f(s x) = s
f(x). Cross-layer equalisation and SmoothQuant choose different s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import CONVOLUTIONS, WEIGHT_INPUTS, LinearForm, form_of, read_linear
from penstock.offline.optimize.model import to_artifact
from penstock.tensor import Array

_ELEMENTWISE = frozenset({"Relu", "LeakyRelu", "Identity"})
_POOLS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
_WRITERS = WEIGHT_INPUTS.keys() | {"Mul", "LayerNormalization"}


class Operand:
    """A constant FP32 input of a node, kept in FP64 for rescaling."""

    def __init__(self, node: ir.Node, index: int, array: Array) -> None:
        self.node = node
        self.index = index
        self.original = array.astype(np.float64)
        self.array = self.original.copy()

    def write(self) -> None:
        """Round the array to FP32 and write it to the graph. Other consumers of the initialiser keep the old values."""
        if np.array_equal(self.array, self.original):
            return
        value, owner = self.node.inputs[self.index], self.node.graph
        assert value is not None
        assert isinstance(owner, ir.Graph)
        with np.errstate(over="ignore"):
            array = self.array.astype(np.float32)
        if not np.isfinite(array).all():
            raise PenstockError(
                f"after rescaling, values of '{value.name}' are out of the range of FP32",
                "quantise the model without equalisation",
            )
        if len(value.uses()) == 1:
            value.const_value = ir.Tensor(array, name=value.name)
        else:
            self.node.replace_input_with(self.index, graph.add_constant(owner, array, f"{value.name}"))


class ScaledOperand(NamedTuple):
    """An operand with the channels of a link. Its shape ``view`` has separate axes for channels. ``scale`` broadcasts to ``view``."""

    operand: Operand
    view: tuple[int, ...]
    scale: tuple[int, ...]

    def multiply(self, factors: Array) -> None:
        array = self.operand.array
        self.operand.array = (array.reshape(self.view) * factors.reshape(self.scale)).reshape(array.shape)

    def ranges(self) -> Array:
        """The largest magnitude of each channel."""
        others = tuple(axis for axis, size in enumerate(self.scale) if size == 1 and self.view[axis] != 1)
        return np.asarray(np.abs(self.operand.array.reshape(self.view)).max(axis=others).reshape(-1))


class Read(NamedTuple):
    """One consumer at the end of a link: a product with constant weights, and its input tensor."""

    node: ir.Node
    side: ScaledOperand
    tensor: str
    axis: int
    """The axis of the channels: 1 or -1."""
    block: int
    """Number of consecutive elements of one channel along the axis; more than 1 after Flatten."""


class Link:
    """The paths from the node that computes a tensor's channels to all products that consume them."""

    def __init__(self, writer: ir.Node, channels: int) -> None:
        self.writer = writer
        self.channels = channels
        self.written: list[ScaledOperand] = []
        """The operands to divide by s. The first operand is the producer's weight."""
        self.reads: list[Read] = []
        self.clips: list[tuple[ir.Node, float]] = []
        """All Clips with lower bound 0, each with its upper bound. A Clip is homogeneous only if no value reaches the upper bound."""

    def rescale(self, s: Array) -> None:
        """Divide the tensor by ``s``, shape (channels,), FP64, positive."""
        for side in self.written:
            side.multiply(1 / s)
        for read in self.reads:
            read.side.multiply(s)

    def read_ranges(self) -> Array:
        """The largest magnitude of each channel in the weights of all consumers."""
        return np.asarray(np.max([read.side.ranges() for read in self.reads], axis=0))

    def reduce(self, array: Array, read: Read) -> Array:
        """The largest value of each channel in ``array``, which is a batch of the tensor ``read.tensor``."""
        last = np.moveaxis(array, read.axis, -1).reshape(-1, self.channels, read.block)
        return np.asarray(last.max(axis=(0, 2)).astype(np.float64))

    @property
    def name(self) -> str:
        return f"{self.writer.outputs[0].name}"


class Rescaling:
    """All links of a model, in the order of their producers. Several links can share an operand."""

    def __init__(self, model: ir.Model) -> None:
        self._operands: dict[tuple[int, int], Operand] = {}
        self.model = model
        self.links: list[Link] = []
        for node in graph.plain_nodes(model):
            started = self._start(node)
            if started is not None:
                link, axis = started
                if self._follow(node.outputs[0], axis, 1, link) and link.reads:
                    self.links.append(link)

    def restore(self) -> None:
        """Restore every operand."""
        for operand in self._operands.values():
            operand.array = operand.original.copy()

    def write(self) -> Artifact:
        """The rescaled model."""
        for operand in self._operands.values():
            operand.write()
        return to_artifact(self.model)

    def _operand(self, node: ir.Node, index: int) -> Operand | None:
        value = graph.input_of(node, index)
        array = graph.constant(value)
        if value is None or array is None or value.dtype != ir.DataType.FLOAT:
            return None
        return self._operands.setdefault((id(node), index), Operand(node, index, array))

    def _start(self, node: ir.Node) -> tuple[Link, int] | None:
        """A link that may start at ``node``, and the axis of its channels; None if no link can start there."""
        place = 0 if node.op_type == "Mul" and graph.is_constant(node.inputs[0]) else 1
        weight = self._operand(node, place) if node.op_type in _WRITERS else None
        if weight is None or any(graph.is_used(output) for output in node.outputs[1:]):
            return None
        shape, linear = weight.array.shape, read_linear(node)
        if linear is not None:
            side = ScaledOperand(weight, linear.channel_view, linear.scale_view)
        elif node.op_type in ("MatMul", "Mul", "LayerNormalization"):
            is_matrix = node.op_type == "MatMul" and len(shape) == 2
            is_row = weight.array.size > 1 and shape[-1] == weight.array.size
            fits = is_row and len(shape) <= (graph.rank(node.outputs[0]) or 1)
            if not (is_matrix or (fits and graph.int_attribute(node, "axis", -1) == -1)):
                return None
            side = ScaledOperand(weight, shape, (*(1 for _ in shape[1:]), shape[-1]))
        else:
            return None
        link = Link(node, math.prod(side.scale))
        link.written.append(side)
        return (link, 1 if node.op_type in CONVOLUTIONS else -1) if self._bias(node, link) else None

    def _bias(self, node: ir.Node, link: Link) -> bool:
        """Add the bias, if there is one, to ``link.written``; False if it does not have one number per channel."""
        if graph.input_of(node, 2) is None:
            return True
        bias = self._operand(node, 2)
        if bias is None or bias.array.size != link.channels or bias.array.shape[-1] != link.channels:
            return False
        link.written.append(ScaledOperand(bias, bias.array.shape, bias.array.shape))
        return True

    def _follow(self, value: ir.Value, axis: int, block: int, link: Link) -> bool:
        """True if every path from ``value`` ends in a product that can absorb s. Adds the products to ``link.reads``."""
        uses = value.uses()
        if value.is_graph_output() or not uses:
            return False
        return all(
            use.node.graph is link.writer.graph
            and list(use.node.inputs).count(value) == 1
            and use.node.domain == ""
            and (self._pass(use.node, value, axis, block, link) or self._read(use.node, value, axis, block, link))
            for use in uses
        )

    def _pass(self, node: ir.Node, value: ir.Value, axis: int, block: int, link: Link) -> bool:
        """True if ``node`` is homogeneous in each channel, and every path from its output ends in a product."""
        if any(graph.is_used(other) for other in node.outputs[1:]):
            return False
        if (
            node.op_type in _ELEMENTWISE
            or (node.op_type in _POOLS and axis == 1)
            or (axis == -1 and _keeps_last(node, value))
            or (node.op_type == "Add" and block == 1 and self._shift(node, axis, link))
            or (node.op_type == "Clip" and _limit(node, link))
        ):
            return self._follow(node.outputs[0], axis, block, link)
        size = _flattened(node, value, axis)
        return size is not None and self._follow(node.outputs[0], -1, size, link)

    def _shift(self, node: ir.Node, axis: int, link: Link) -> bool:
        """True if ``node`` adds one constant per channel. Adds the constant to ``link.written``."""
        place = next((index for index in (0, 1) if graph.is_constant(node.inputs[index])), None)
        operand = None if place is None else self._operand(node, place)
        if operand is None or operand.array.size != link.channels:
            return False
        shape, rank = operand.array.shape, graph.rank(node.outputs[0]) or 1
        at = -1 if axis == -1 else 1 - rank
        if not -len(shape) <= at < 0 or shape[at] != link.channels or len(shape) > rank:
            return False
        link.written.append(ScaledOperand(operand, shape, shape))
        return True

    def _read(self, node: ir.Node, value: ir.Value, axis: int, block: int, link: Link) -> bool:
        if graph.input_of(node, 0) is not value or (weight := self._operand(node, 1)) is None:
            return False
        form = form_of(node)
        if form is None or form.transposes_input:
            return False
        if node.op_type in CONVOLUTIONS:
            side = _convolution_side(node, form, weight, link.channels) if axis == 1 and block == 1 else None
        elif node.op_type == "MatMul" and (axis != -1 or weight.array.ndim != 2):
            return False
        else:
            side = _product_side(weight, link.channels, block, form.inputs)
        if side is None:
            return False
        link.reads.append(Read(node, side, f"{value.name}", axis, block))
        return True


def _convolution_side(node: ir.Node, form: LinearForm, weight: Operand, channels: int) -> ScaledOperand | None:
    shape = weight.array.shape
    ones = tuple(1 for _ in shape[2:])
    if node.op_type == "ConvTranspose":
        return ScaledOperand(weight, shape, (channels, 1, *ones)) if shape[0] == channels else None
    groups = form.groups
    if shape[1] * groups != channels or shape[0] % groups:
        return None
    return ScaledOperand(weight, (groups, shape[0] // groups, *shape[1:]), (groups, 1, shape[1], *ones))


def _product_side(weight: Operand, channels: int, block: int, axis: int) -> ScaledOperand | None:
    shape = weight.array.shape
    if len(shape) != 2 or shape[axis] != channels * block:
        return None
    if axis == 0:
        return ScaledOperand(weight, (channels, block, shape[1]), (channels, 1, 1))
    return ScaledOperand(weight, (shape[0], channels, block), (1, channels, 1))


def _limit(node: ir.Node, link: Link) -> bool:
    """True if a Clip has constant bounds that start at 0. Adds the Clip to ``link.clips``."""
    low, high = (graph.constant(graph.input_of(node, place)) for place in (1, 2))
    bottom = graph.float_attribute(node, "min", -np.inf) if low is None else float(low.reshape(()))
    top = graph.float_attribute(node, "max", np.inf) if high is None else float(high.reshape(()))
    given = [graph.input_of(node, place) for place, array in ((1, low), (2, high)) if array is None]
    if bottom != 0.0 or not 0 < top < np.inf or any(given):
        return False
    link.clips.append((node, top))
    return True


def _keeps_last(node: ir.Node, value: ir.Value) -> bool:
    """True if ``node`` works only on axes other than the last one."""
    rank, output = graph.rank(value), node.outputs[0]
    if rank is None or value is not graph.input_of(node, 0):
        return False
    match node.op_type:
        case "ReduceMean":
            axes = _axes(node)
            return axes is not None and bool(axes) and all(axis % rank != rank - 1 for axis in axes)
        case "Gather":
            return graph.int_attribute(node, "axis", 0) % rank != rank - 1
        case "Transpose":
            order = graph.ints_attribute(node, "perm")
            return order is not None and order[-1] == rank - 1
        case "Reshape":
            last = (shape[-1] for shape in (value.shape, output.shape) if shape is not None and shape.rank() > 0)
            sizes = [size for size in last if isinstance(size, int)]
            return len(sizes) == 2 and sizes[0] == sizes[1]
    return False


def _axes(node: ir.Node) -> list[int] | None:
    """The axes of a ReduceMean, from its attribute or constant input; None if they are not known."""
    constant = graph.constant(graph.input_of(node, 1))
    return graph.ints_attribute(node, "axes") if constant is None else [int(axis) for axis in constant.reshape(-1)]


def _flattened(node: ir.Node, value: ir.Value, axis: int) -> int | None:
    """Number of elements of one channel along the last axis of the output; None if ``node`` does not flatten."""
    output, rank = node.outputs[0], graph.rank(value)
    if axis != 1 or value.shape is None or rank is None or rank < 3:
        return None
    if node.op_type == "ReduceMean" and graph.rank(output) == 2:
        axes = _axes(node)
        return 1 if axes is not None and {item % rank for item in axes} == set(range(2, rank)) else None
    sizes = [size for size in value.shape[1:] if isinstance(size, int)]
    places = math.prod(sizes[1:])
    if len(sizes) != rank - 1:
        return None
    if node.op_type == "Flatten" and graph.int_attribute(node, "axis", 1) == 1:
        return places
    to_rows = node.op_type == "Reshape" and output.shape is not None and graph.rank(output) == 2
    return places if to_rows and output.shape is not None and output.shape[1] == sizes[0] * places else None
