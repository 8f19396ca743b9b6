"""Rules of the operators that move axes or elements: Reshape, Transpose, MatMul, Concat, Split, Slice, Gather.

Attention needs no special rule. Reshape splits queries, keys and values into heads, so each head becomes one unit of the preceding
layer. MatMul joins the heads of queries and keys, then the heads of attention weights and values. The Reshape that concatenates the
heads carries the units on to the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from penstock.errors import Unsupported
from penstock.offline.compress.pruning.structured.channels import replace_constant, set_entry, weights_of
from penstock.offline.compress.pruning.structured.coupling import Axes, ChannelSlot, Coupling, Labels, Rule, describe
from penstock.offline.optimize import graph

Dim = int | str | None
Block = tuple[slice, slice]
"""Input axes and output axes of a Reshape that contain the same elements in the same order."""


def matmul(coupling: Coupling, node: ir.Node) -> None:
    """A product with a weight matrix [K, N] is a layer. A product of activations joins batch axes and freezes the summed axis."""
    left, right = node.inputs
    if graph.is_constant(right) and len(weights_of(node, 1).shape) == 2 and coupling.read(left):
        x = coupling.read(left)
        made = coupling.fresh(weights_of(node, 1).shape[1])
        coupling.slots.append(ChannelSlot(node, 1, 1, made, "makes"))
        if x[-1] is not None:
            coupling.slots.append(ChannelSlot(node, 1, 0, x[-1], "reads"))
        coupling.axes[node.outputs[0]] = [*x[:-1], made]
        return
    a, b = coupling.read(left), coupling.read(right)
    if min(len(a), len(b)) < 2 or graph.is_constant(left) or graph.is_constant(right):
        raise Unsupported(f"{describe(node)} multiplies by a constant that is not a matrix on the right")
    for labels in (a[-1], b[-2]):
        coupling.freeze(labels, f"{describe(node)} sums over them")
    batch: Axes = [_same_axis(coupling, node, back) for back in range(max(len(a), len(b)), 2, -1)]
    coupling.axes[node.outputs[0]] = [*batch, a[-2], b[-1]]


def _same_axis(coupling: Coupling, node: ir.Node, back: int) -> Labels | None:
    """The labels of the batch axis at position ``back``, counted from the end. Labels are frozen if the sizes of the two operands
    differ, or if the other operand's axis is fixed.
    """
    found = [coupling.read(value)[-back] for value in node.inputs if len(coupling.read(value)) >= back]
    labelled = [labels for labels in found if labels is not None]
    if len(labelled) == 2 and len(labelled[0]) == len(labelled[1]):
        coupling.join(*labelled)
        return labelled[0]
    for labels in labelled:
        coupling.freeze(labels, f"{describe(node)} multiplies them with a fixed axis")
    return None


def transpose(coupling: Coupling, node: ir.Node) -> None:
    x = coupling.read(node.inputs[0])
    order = graph.ints_attribute(node, "perm") or list(range(len(x)))[::-1]
    coupling.axes[node.outputs[0]] = [x[axis] for axis in order] if x else []


def reshape(coupling: Coupling, node: ir.Node) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: match input axes to output axes by their sizes."""
    source, target = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or target.shape is None:
        raise Unsupported(f"the shapes around {describe(node)} are not known")
    x, dims, made = coupling.read(source), _dims(source), _dims(target)
    result: Axes = [None] * len(made)
    left = set(range(len(x)))
    for before, after in _blocks(dims, made):
        left -= set(range(len(x))[before])
        result[after] = _regroup(coupling, node, x[before], dims[before], made[after])
    for axis in left:
        coupling.freeze(x[axis], f"{describe(node)} reshapes them in an unknown way")
    if node.op_type == "Reshape":
        for position, labels in enumerate(result):
            if labels is not None:
                _let_shape_follow(coupling, node, position, labels)
    coupling.axes[target] = result


def _dims(value: ir.Value) -> list[Dim]:
    assert value.shape is not None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims]


def _blocks(before: list[Dim], after: list[Dim]) -> Iterator[Block]:
    """Blocks of input axes and output axes with equal products. The search starts at the last axis and goes backwards while sizes are
    known; it then continues from the first axis.
    """
    i0 = j0 = 0
    for i, j in _run(before[::-1], after[::-1]):
        yield slice(len(before) - i, len(before) - i0), slice(len(after) - j, len(after) - j0)
        i0, j0 = i, j
    before, after = before[: len(before) - i0], after[: len(after) - j0]
    i0 = j0 = 0
    for i, j in _run(before, after):
        yield slice(i0, i), slice(j0, j)
        i0, j0 = i, j


def _run(before: list[Dim], after: list[Dim]) -> Iterator[tuple[int, int]]:
    """The pairs of positions at which the products of both shapes agree. Free dimensions agree if they have the same name."""
    i = j = 0
    while i < len(before) and j < len(after):
        a, b = before[i], after[j]
        i, j = i + 1, j + 1
        while a != b:
            if not (isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0):
                return
            if a < b and i < len(before):
                step, i = before[i], i + 1
                a = a * step if isinstance(step, int) else None
            elif b < a and j < len(after):
                step, j = after[j], j + 1
                b = b * step if isinstance(step, int) else None
            else:
                return
        if a is None:
            return
        yield i, j


def _regroup(coupling: Coupling, node: ir.Node, x: Axes, before: list[Dim], after: list[Dim]) -> Axes:
    """The labels of one block after Reshape. One of the output axes keeps labels, and its positions become units."""
    held = [axis for axis, labels in enumerate(x) if labels is not None]
    result: Axes = [None] * len(after)
    if len(held) != 1:
        for axis in held:
            coupling.freeze(x[axis], f"{describe(node)} merges them with another axis")
        return result
    if len(before) == len(after) == 1:
        return list(x)
    labels, sizes, made = x[held[0]], _known(before), _known(after)
    assert labels is not None
    view = [1] * len(sizes)
    view[held[0]] = -1
    grid = np.broadcast_to(labels.reshape(view), sizes).reshape(made)
    axis, is_choice = _axis_of_units(coupling, node, grid)
    rows = np.moveaxis(grid, axis, 0).reshape(made[axis], -1)
    for column in range(1, rows.shape[1]):
        coupling.join(rows[:, 0], rows[:, column])
    result[axis] = np.ascontiguousarray(rows[:, 0])
    if is_choice:
        coupling.choices[node] = rows[:, 0]
    return result


def _axis_of_units(coupling: Coupling, node: ir.Node, grid: Labels) -> tuple[int, bool]:
    """The axis that carries the units, and True if another axis was possible.

    If the units differ along one axis only, that axis carries them. Otherwise the first choice is the last axis but one (the heads in
    [heads, size] or [3, heads, size]), and the second choice is the last axis.
    """
    wide = [axis for axis, size in enumerate(grid.shape) if size > 1]
    roots = coupling.roots(grid.reshape(-1)).reshape(grid.shape)
    for axis in wide:
        rows = np.moveaxis(roots, axis, 0).reshape(grid.shape[axis], -1)
        if (rows == rows[:, :1]).all():
            return axis, False
    if len(wide) < 2:
        return (wide or [0])[0], False
    return wide[-1 if node in coupling.second_choice else -2], True


def _known(dims: list[Dim]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if isinstance(dim, int))


def _let_shape_follow(coupling: Coupling, node: ir.Node, position: int, labels: Labels) -> None:
    """Rewrite the axis's entry in the shape after a cut. Entries that copy (0) or infer (-1) the size need no change."""
    holder, index, offset = _entry(node, position)
    size = None if holder is None else int(weights_of(holder, index).reshape(-1)[offset])
    if holder is not None and size is not None and size > 0:
        set_entry(coupling, holder, index, offset, labels)
        return
    copied = (coupling.read(node.inputs[0]) + [None] * position)[position] if size == 0 else None
    if size != -1 and (copied is None or not np.array_equal(coupling.roots(copied), coupling.roots(labels))):
        coupling.freeze(labels, f"{describe(node)} computes their number")


def _entry(node: ir.Node, position: int) -> tuple[ir.Node | None, int, int]:
    """The node, input and offset of the constant that contains an entry of the shape. The constant is the shape itself, or an operand
    of the Concat that computes the shape.
    """
    shape = node.inputs[1]
    if graph.is_constant(shape):
        return node, 1, position
    concat = shape.producer() if shape is not None else None
    if concat is None or concat.op_type != "Concat" or graph.sole_consumer(concat.outputs[0]) is not node:
        return None, 0, 0
    for index, part in enumerate(concat.inputs):
        length = graph.static_shape(part)
        if length is None:
            break
        if position < length[0]:
            return (concat, index, position) if graph.is_constant(part) else (None, 0, 0)
        position -= length[0]
    return None, 0, 0


def concat(coupling: Coupling, node: ir.Node) -> None:
    """Labels are concatenated along the axis of Concat, and joined along all other axes."""
    parts = [coupling.read(value) for value in node.inputs]
    if any(value is None or value.shape is None for value in node.inputs):
        raise Unsupported(f"an operand of {describe(node)} has no known rank")
    axis = graph.int_attribute(node, "axis", 0) % max(1, len(parts[0]))
    result: Axes = []
    for other in range(len(parts[0])):
        found = [part[other] for part in parts]
        labelled = [labels for labels in found if labels is not None]
        if other == axis or not labelled:
            result.append(_concatenated(coupling, node, axis) if other == axis and labelled else None)
            continue
        for labels in labelled[1:]:
            coupling.join(labelled[0], labels)
        if len(labelled) < len(found):
            coupling.freeze(labelled[0], f"{describe(node)} combines them with a fixed axis")
        result.append(labelled[0])
    coupling.axes[node.outputs[0]] = result


def _concatenated(coupling: Coupling, node: ir.Node, axis: int) -> Labels | None:
    pieces: list[Labels] = []
    for value in node.inputs:
        labels = coupling.read(value)[axis]
        size = value.shape[axis] if value is not None and value.shape is not None else None
        if labels is None and isinstance(size, int):
            name = value.name if value else ""
            labels = coupling.fixed(size, f"{describe(node)} takes them from '{name}', which is fixed")
        if labels is None:
            for other in node.inputs:
                coupling.freeze(coupling.read(other)[axis], f"{describe(node)} has an operand of unknown size")
            return None
        pieces.append(labels)
    return np.concatenate(pieces)


def split(coupling: Coupling, node: ir.Node) -> None:
    """The part sizes of a Split are updated after channels are cut."""
    x = coupling.read(node.inputs[0])
    if not x:
        raise Unsupported(f"the input of {describe(node)} has no known rank")
    axis = graph.int_attribute(node, "axis", 0) % len(x)
    labels = x[axis]
    parts: list[Labels | None] = [None] * len(node.outputs)
    if labels is not None:
        sizes = _part_sizes(node, len(labels))
        made = np.split(labels, np.cumsum(sizes)[:-1])
        parts = [*made]
        coupling.edits.append(lambda count: _write_sizes(node, coupling.opset, [int(count(p).sum()) for p in made]))
    for output, part in zip(node.outputs, parts, strict=True):
        coupling.axes[output] = [*x[:axis], part, *x[axis + 1 :]]


def _part_sizes(node: ir.Node, length: int) -> list[int]:
    listed = graph.ints_attribute(node, "split")
    if graph.input_of(node, 1) is not None:
        listed = weights_of(node, 1).tolist()
    if listed is None:
        each = -(-length // len(node.outputs))
        listed = [min(each, length - number * each) for number in range(len(node.outputs))]
    return listed


def _write_sizes(node: ir.Node, opset: int, sizes: list[int]) -> None:
    for name in ("split", "num_outputs"):
        node.attributes.pop(name, None)
    if opset < 13:
        node.attributes["split"] = ir.AttrInt64s("split", sizes)
        return
    assert isinstance(node.graph, ir.Graph)
    node.resize_inputs(2)
    constant = graph.add_constant(node.graph, np.array(sizes, np.int64), f"{node.outputs[0].name}_sizes")
    node.replace_input_with(1, constant)


def slices(coupling: Coupling, node: ir.Node) -> None:
    """Slicing an axis with labels requires constant bounds and step 1. The bounds are updated after a cut."""
    x = list(coupling.read(node.inputs[0]))
    if graph.input_of(node, 1) is None or not x:
        raise Unsupported(f"{describe(node)} has its bounds as attributes, or an input of unknown rank")
    if not any(labels is not None for labels in x):
        coupling.axes[node.outputs[0]] = x
        return
    starts, ends = weights_of(node, 1), weights_of(node, 2)
    axes = weights_of(node, 3) if graph.input_of(node, 3) is not None else np.arange(len(starts))
    steps = weights_of(node, 4) if graph.input_of(node, 4) is not None else np.ones_like(starts)
    for position, axis in enumerate(axes.tolist()):
        labels = x[axis]
        if labels is None:
            continue
        if steps[position] != 1:
            raise Unsupported(f"{describe(node)} has a step other than 1")
        start, end, _ = slice(int(starts[position]), int(ends[position])).indices(len(labels))
        x[axis] = labels[start:end]
        set_entry(coupling, node, 1, position, labels[:start])
        set_entry(coupling, node, 2, position, labels[: max(start, end)])
    coupling.axes[node.outputs[0]] = x


def gather(coupling: Coupling, node: ir.Node) -> None:
    """A look-up in a weight table is a layer. A look-up in an activation requires constant positions, or an axis without labels."""
    data, indices = node.inputs
    if data is None or data.shape is None or indices is None or indices.shape is None:
        raise Unsupported(f"the shapes around {describe(node)} are not known")
    for labels in coupling.read(indices):
        coupling.freeze(labels, f"{describe(node)} uses their values as indices")
    x = list(coupling.read(data))
    axis = graph.int_attribute(node, "axis", 0) % max(1, len(x))
    picked: Axes = [None] * indices.shape.rank()
    if graph.is_constant(data) and len(x) == 2 and axis == 0:
        made = coupling.fresh(weights_of(node, 0).shape[1])
        coupling.slots.append(ChannelSlot(node, 0, 1, made, "makes"))
        coupling.axes[node.outputs[0]] = [*picked, made]
        return
    labels = x[axis]
    if labels is not None:
        order = weights_of(node, 1)
        if order.ndim != 1:
            raise Unsupported(f"{describe(node)} selects channels with indices that are not a vector")
        picked = [labels[order]]
        coupling.edits.append(lambda count: _write_order(node, order % len(labels), count(labels)))
    coupling.axes[node.outputs[0]] = [*x[:axis], *picked, *x[axis + 1 :]]


def _write_order(node: ir.Node, order: Labels, kept: Labels) -> None:
    replace_constant(node, 1, (np.cumsum(kept) - 1)[order[kept[order]]].astype(np.int64))


def shape(coupling: Coupling, node: ir.Node) -> None:
    """Freeze every axis whose size is used: the axes that Gather and Slice select by constants, otherwise all axes."""
    x = coupling.read(node.inputs[0])
    first, last = graph.int_attribute(node, "start", 0), graph.int_attribute(node, "end", len(x))
    sizes = x[first:last]
    taken: set[int] = set()
    for use in node.outputs[0].uses() if sizes else ():  # a tensor of unknown rank has no axes
        taken |= set(np.arange(len(sizes))[_picked(use.node)].reshape(-1).tolist())
    for position in taken:
        coupling.freeze(sizes[position], f"{describe(node)} reads their number")
    coupling.axes[node.outputs[0]] = [None]


def _picked(node: ir.Node) -> Labels | slice:
    bounds = [graph.constant(graph.input_of(node, index)) for index in (1, 2)]
    if node.op_type == "Gather" and bounds[0] is not None:
        return bounds[0]
    if node.op_type == "Slice" and bounds[0] is not None and bounds[1] is not None and len(node.inputs) < 5:
        return slice(int(bounds[0][0]), int(bounds[1][0]))
    return slice(None)


RULES: dict[str, Rule] = {
    "Concat": concat,
    "Flatten": reshape,
    "Gather": gather,
    "MatMul": matmul,
    "Reshape": reshape,
    "Shape": shape,
    "Slice": slices,
    "Split": split,
    "Squeeze": reshape,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
