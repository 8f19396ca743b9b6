"""Rules of the operators that keep their axes: layers, normalisation, elementwise operators, pooling, resizing.

``heads.py`` has the rules of the operators that move axes or positions.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from penstock.errors import Unsupported
from penstock.offline.compress.pruning.structured.coupling import ChannelSlot, Coupling, Labels, Rule, describe
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.tensor import Array


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    """Abs Acos Add And Asin Atan BitShift Cast Ceil Celu Clip Cos Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual
    HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow
    Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
    """
)
"""Operators whose output elements depend only on the input elements at the same position."""
_POOLING = _names("AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool")
_REDUCTIONS = _names(
    """ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"""
)


def weights_of(node: ir.Node, index: int) -> Array:
    array = graph.constant(graph.input_of(node, index))
    if array is None:
        raise Unsupported(f"the weights of {describe(node)} are computed, not constant")
    return array


def elementwise(coupling: Coupling, node: ir.Node) -> None:
    """Operands are aligned at the last axis, as in broadcasting. Channels of all operands along the same axis are cut together."""
    if any(value is not None and value.shape is None for value in node.inputs):
        raise Unsupported(f"an operand of {describe(node)} has no known rank")
    ranks = [graph.rank(value) or 0 for value in node.inputs if value is not None]
    _only_first_output(node)
    coupling.axes[node.outputs[0]] = [_meet(coupling, node, back) for back in range(max(ranks), 0, -1)]


def _meet(coupling: Coupling, node: ir.Node, back: int) -> Labels | None:
    """The joined labels of the operands' axis at position ``back``, counted from the end. Constants that extend along this axis are
    cut together with it.
    """
    labelled: list[Labels] = []
    constants: list[tuple[int, int]] = []
    fixed: str | None = None
    for index, value in enumerate(node.inputs):
        axis = (graph.rank(value) or 0) - back
        if value is None or value.shape is None or axis < 0:
            continue
        labels = coupling.read(value)[axis]
        if graph.is_constant(value):
            if value.shape[axis] != 1:
                constants.append((index, axis))
        elif value.shape[axis] == 1:
            coupling.freeze(labels, f"{describe(node)} may broadcast them")
        elif labels is not None:
            labelled.append(labels)
        else:
            fixed = value.name
    if not labelled:
        return None
    first = labelled[0]
    for other in labelled[1:]:
        coupling.join(first, other)
    if fixed is not None:
        coupling.freeze(first, f"{describe(node)} combines them with '{fixed}', whose width is fixed")
    for index, axis in constants:
        coupling.slots.append(ChannelSlot(node, index, axis, first))
    return first


def convolution(coupling: Coupling, node: ir.Node) -> None:
    """Conv [O, I/g, …] and ConvTranspose [I, O/g, …]; bias [O]. Grouped convolutions can only lose whole groups."""
    weight, form = weights_of(node, 1), form_of(node)
    assert form is not None
    bias = None if graph.input_of(node, 2) is None else weights_of(node, 2)
    x = coupling.read(node.inputs[0])
    if len(x) != weight.ndim:
        raise Unsupported(f"the input of {describe(node)} has no known rank")
    for labels in x[:1] + x[2:]:
        coupling.freeze(labels, f"{describe(node)} reads them as positions, not as channels")
    if form.groups == 1:
        made = coupling.fresh(weight.shape[form.outputs])
        coupling.slots.append(ChannelSlot(node, 1, form.outputs, made, "makes"))
        if x[1] is not None:
            coupling.slots.append(ChannelSlot(node, 1, form.inputs, x[1], "reads"))
    else:
        made = _grouped(coupling, node, weight, form.groups, x[1])
    if bias is not None:
        coupling.slots.append(ChannelSlot(node, 2, 0, made))
    coupling.axes[node.outputs[0]] = [None, made, *(None for _ in x[2:])]


def _grouped(coupling: Coupling, node: ir.Node, weight: Array, groups: int, read: Labels | None) -> Labels:
    """The input and output channels of one group of a convolution form one unit."""
    outputs = weight.shape[1] * groups if node.op_type == "ConvTranspose" else weight.shape[0]
    if read is None:
        return coupling.fixed(outputs, f"{describe(node)} has groups and reads fixed channels")
    rows = read.reshape(groups, -1)
    for column in range(1, rows.shape[1]):
        coupling.join(rows[:, 0], rows[:, column])
    units = rows[:, 0]
    made: Labels = units.repeat(outputs // groups)
    coupling.slots.append(ChannelSlot(node, 1, 0, units.repeat(weight.shape[0] // groups)))
    coupling.edits.append(lambda count: node.attributes.add(ir.AttrInt64("group", int(count(units).sum()))))
    return made


def gemm(coupling: Coupling, node: ir.Node) -> None:
    """[M, K] by [K, N], or [N, K] with ``transB``; the bias broadcasts to [M, N]."""
    weight, form = weights_of(node, 1), form_of(node)
    bias = None if graph.input_of(node, 2) is None else weights_of(node, 2)
    assert form is not None
    if form.transposes_input:
        raise Unsupported(f"{describe(node)} transposes its input")
    rows, read = [*coupling.read(node.inputs[0]), None, None][:2]
    made = coupling.fresh(weight.shape[form.outputs])
    coupling.slots.append(ChannelSlot(node, 1, form.outputs, made, "makes"))
    if read is not None:
        coupling.slots.append(ChannelSlot(node, 1, form.inputs, read, "reads"))
    if bias is not None and bias.ndim and bias.shape[-1] != 1:
        coupling.slots.append(ChannelSlot(node, 2, bias.ndim - 1, made))
    coupling.freeze(rows, f"{describe(node)} reads them as rows")
    coupling.axes[node.outputs[0]] = [None, made]


def channel_norm(coupling: Coupling, node: ir.Node) -> None:
    """BatchNormalization and InstanceNormalization have one parameter of each kind per channel, axis 1."""
    _only_first_output(node)
    x = coupling.read(node.inputs[0])
    if len(x) < 2 or any(graph.constant(value) is None for value in node.inputs[1:]):
        raise Unsupported(f"the parameters of {describe(node)} are not constant")
    if x[1] is not None:
        for index in range(1, len(node.inputs)):
            coupling.slots.append(ChannelSlot(node, index, 0, x[1]))
    for labels in x[2:] if node.op_type == "InstanceNormalization" else ():
        coupling.blur(labels, f"{describe(node)} normalises over them")
    coupling.axes[node.outputs[0]] = list(x)


def layer_norm(coupling: Coupling, node: ir.Node) -> None:
    """The mean and variance are computed over all axes from ``axis`` on, so they change with the number of channels."""
    _only_first_output(node)
    x = coupling.read(node.inputs[0])
    first = graph.int_attribute(node, "axis", -1) % max(1, len(x))
    parameters = [index for index in range(1, len(node.inputs)) if node.inputs[index] is not None]
    for index in parameters:
        if weights_of(node, index).ndim > len(x):
            raise Unsupported(f"the parameters of {describe(node)} have more axes than its input")
    for axis, labels in enumerate(x):
        if labels is None or axis < first:
            continue
        coupling.blur(labels, f"{describe(node)} normalises over them")
        for index in parameters:
            shape = weights_of(node, index).shape
            own = axis - len(x) + len(shape)
            if own >= 0 and shape[own] != 1:
                coupling.slots.append(ChannelSlot(node, index, own, labels))
    coupling.axes[node.outputs[0]] = list(x)


def pooling(coupling: Coupling, node: ir.Node) -> None:
    _only_first_output(node)
    x = coupling.read(node.inputs[0])
    for labels in x[:1] + x[2:]:
        coupling.freeze(labels, f"{describe(node)} pools over them")
    coupling.axes[node.outputs[0]] = [None, *x[1:2], *(None for _ in x[2:])]


def reduction(coupling: Coupling, node: ir.Node) -> None:
    """The result of a reduction depends on the number of elements, so channels that are reduced over are not cut."""
    x = coupling.read(node.inputs[0])
    listed = graph.ints_attribute(node, "axes")
    if graph.input_of(node, 1) is not None:
        listed = weights_of(node, 1).reshape(-1).tolist()
    if not x or (not listed and graph.int_attribute(node, "noop_with_empty_axes", 0)):
        raise Unsupported(f"the axes of {describe(node)} are not known")
    gone = {axis % len(x) for axis in listed} if listed else set(range(len(x)))
    for axis in gone:
        coupling.blur(x[axis], f"{describe(node)} runs over them")
    keep = graph.int_attribute(node, "keepdims", 1)
    kept = [None if axis in gone else labels for axis, labels in enumerate(x) if keep or axis not in gone]
    coupling.axes[node.outputs[0]] = kept


def softmax(coupling: Coupling, node: ir.Node) -> None:
    x = coupling.read(node.inputs[0])
    if not x:
        raise Unsupported(f"the input of {describe(node)} has no known rank")
    old = coupling.opset < 13  # before opset 13, softmax is computed over all axes starting at ``axis``
    first = graph.int_attribute(node, "axis", 1 if old else -1) % len(x)
    for labels in x[first:] if old else x[first : first + 1]:
        coupling.freeze(labels, f"{describe(node)} runs over them")
    coupling.axes[node.outputs[0]] = list(x)


def resize(coupling: Coupling, node: ir.Node) -> None:
    """An axis with labels can be cut if its scale is 1, or if its target size is its current size, which is updated after a cut."""
    x = list(coupling.read(node.inputs[0]))
    scales, sizes = (graph.constant(graph.input_of(node, index)) for index in (2, 3))
    listed = graph.ints_attribute(node, "axes")
    axes = list(range(len(x))) if listed is None else [axis % len(x) for axis in listed]
    given = scales if scales is not None and scales.size else sizes
    if node.op_type == "Upsample":
        given = graph.constant(graph.input_of(node, 1))
    if given is None or given.size != len(axes):
        raise Unsupported(f"the sizes of {describe(node)} are computed")
    for position, axis in enumerate(axes):
        labels = x[axis]
        if labels is None:
            continue
        if given is sizes and int(given[position]) == len(labels):
            set_entry(coupling, node, 3, position, labels)
        elif given is sizes or float(given[position]) != 1:
            coupling.freeze(labels, f"{describe(node)} resizes them")
            x[axis] = None  # the resized axis has another length
    coupling.axes[node.outputs[0]] = x


def pad(coupling: Coupling, node: ir.Node) -> None:
    x = coupling.read(node.inputs[0])
    pads = weights_of(node, 1)
    if graph.input_of(node, 3) is not None or pads.size != 2 * len(x):
        raise Unsupported(f"{describe(node)} has an input that lists the axes to pad")
    padded = [bool(pads[axis] or pads[len(x) + axis]) for axis in range(len(x))]
    for labels, is_padded in zip(x, padded, strict=True):
        if is_padded:
            coupling.freeze(labels, f"{describe(node)} pads them")
    # A padded axis has another length.
    coupling.axes[node.outputs[0]] = [None if changed else one for one, changed in zip(x, padded, strict=True)]


def set_entry(coupling: Coupling, node: ir.Node, index: int, position: int, labels: Labels) -> None:
    """After a cut, set entry ``position`` of a constant vector to the number of ``labels`` that are kept."""

    def edit(count: Callable[[Labels], Array]) -> None:
        array = weights_of(node, index).copy()
        array[position] = count(labels).sum()
        replace_constant(node, index, array)

    coupling.edits.append(edit)


def replace_constant(node: ir.Node, index: int, array: Array) -> None:
    """Replace the constant of one input. Other consumers keep the old constant."""
    old = node.inputs[index]
    assert isinstance(node.graph, ir.Graph)
    assert old is not None
    node.replace_input_with(index, graph.add_constant(node.graph, array, f"{old.name}"))


def _only_first_output(node: ir.Node) -> None:
    if any(graph.is_used(output) for output in node.outputs[1:]):
        raise Unsupported(f"the second output of {describe(node)} is used")


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_POOLING, pooling),
    **dict.fromkeys(_REDUCTIONS, reduction),
    "BatchNormalization": channel_norm,
    "InstanceNormalization": channel_norm,
    "Conv": convolution,
    "ConvTranspose": convolution,
    "Gemm": gemm,
    "LayerNormalization": layer_norm,
    "RMSNormalization": layer_norm,
    "LogSoftmax": softmax,
    "Softmax": softmax,
    "Pad": pad,
    "Resize": resize,
    "Upsample": resize,
}
