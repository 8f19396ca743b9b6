"""Remove nodes that return their input unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import NodePass


class IdentityElimination(NodePass):
    """Remove each node whose output has the values, shape and type of its input.

    Removed:

    1. Identity, and Concat of one tensor.
    2. Dropout in inference mode whose mask is unused.
    3. Transpose whose ``perm`` keeps the order of axes.
    4. Reshape to the input's own shape: the rank is the same, and all dimensions except one are copied (0) or known to be equal.
       Flatten of a matrix at axis 1.
    5. Cast to the input's type.
    6. Pad with all pads 0.
    7. Slice of the whole input, by constant bounds.
    8. Add or Sub of 0, and Mul or Div by 1, if broadcasting the constant does not change the shape. The sign of ``-0 + 0`` is ignored.

    Not removed:

    9. A node that reads a graph input, an initialiser or a graph output, and writes a graph output: both names must stay.
    10. A node whose rule needs a shape or type that is unknown, a Slice with computed bounds, and Dropout before opset 7.
    """

    name = "identity_elimination"

    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        source, rule = None, _RULES.get(node.op_type)
        if node.op_type in _NEUTRAL:
            source = _neutral_operand(node)
        elif rule is not None and rule(node, graph.opset(model)):
            source = node.inputs[0]
        return source is not None and graph.replace_by_input(node, source)  # Rule 9


def _identity(node: ir.Node, _opset: int) -> bool:
    return len(node.inputs) == 1  # Rule 1


def _dropout(node: ir.Node, opset: int) -> bool:  # Rule 2
    training = graph.input_of(node, 2)
    flag = graph.constant(training)
    is_training = training is not None and (flag is None or bool(flag))
    return opset >= 7 and not is_training and not any(graph.is_used(output) for output in node.outputs[1:])


def _transpose(node: ir.Node, _opset: int) -> bool:  # Rule 3
    order = graph.ints_attribute(node, "perm")
    return order is not None and order == sorted(order)


def _reshape(node: ir.Node, _opset: int) -> bool:  # Rule 4
    source, target = node.inputs[0], graph.constant(graph.input_of(node, 1))
    if source is None or source.shape is None or target is None or target.shape != (source.shape.rank(),):
        return False  # Rule 10
    copies_zero = graph.int_attribute(node, "allowzero", 0) == 0
    same = [
        (want == 0 and copies_zero) or (isinstance(have, int) and have == want)
        for want, have in zip(target.tolist(), source.shape.dims, strict=True)
    ]
    # The number of elements determines the remaining dimension, unless another dimension is 0.
    rest = [want for want, is_same in zip(target.tolist(), same, strict=True) if not is_same]
    return not rest or rest == [-1]


def _flatten(node: ir.Node, _opset: int) -> bool:  # Rule 4
    return graph.rank(node.inputs[0]) == 2 and graph.int_attribute(node, "axis", 1) in (1, -1)


def _cast(node: ir.Node, _opset: int) -> bool:  # Rule 5
    source = node.inputs[0]
    return source is not None and source.dtype is not None and source.dtype == graph.int_attribute(node, "to", 0)


def _pad(node: ir.Node, _opset: int) -> bool:  # Rule 6
    by_attribute = graph.ints_attribute(node, "pads")
    if by_attribute is not None:
        return not any(by_attribute)
    pads = graph.constant(graph.input_of(node, 1))
    return pads is not None and not pads.any()


def _slice(node: ir.Node, opset: int) -> bool:  # Rule 7
    source = node.inputs[0]
    if opset < 10 or source is None or source.shape is None:
        return False  # Rule 10
    given = [graph.input_of(node, index) for index in range(1, 5)]
    starts, ends, axes, steps = (graph.constant(value) for value in given)
    if starts is None or ends is None or any(value is not None and not graph.is_constant(value) for value in given):
        return False  # Rule 10
    order = axes.tolist() if axes is not None else list(range(len(starts)))
    if steps is not None and (steps != 1).any():
        return False
    for start, end, axis in zip(starts.tolist(), ends.tolist(), order, strict=True):
        size = source.shape.dims[axis]
        reaches_end = end >= (size if isinstance(size, int) else np.iinfo(np.int32).max)
        if start != 0 or not reaches_end:
            return False
    return True


def _neutral_operand(node: ir.Node) -> ir.Value | None:  # Rule 8
    neutral, sides = _NEUTRAL[node.op_type]
    for side in sides:
        source, array = node.inputs[1 - side], graph.constant(node.inputs[side])
        if source is None or array is None or not (array == neutral).all():
            continue
        if array.ndim == 0 or _fits(array.shape, source):
            return source
    return None


def _fits(shape: tuple[int, ...], source: ir.Value) -> bool:
    """True if a tensor of ``shape`` broadcasts to the shape of ``source`` for all values of the unknown dimensions of ``source``."""
    if source.shape is None or len(shape) > source.shape.rank():
        return False
    dims = source.shape.dims[source.shape.rank() - len(shape) :]
    return all(size in (1, dim) for size, dim in zip(shape, dims, strict=True))


_RULES: dict[str, Callable[[ir.Node, int], bool]] = {
    "Identity": _identity,
    "Concat": _identity,
    "Dropout": _dropout,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Cast": _cast,
    "Pad": _pad,
    "Slice": _slice,
}

# operator -> (neutral constant, sides on which the constant is neutral)
_NEUTRAL = {"Add": (0, (0, 1)), "Sub": (0, (1,)), "Mul": (1, (0, 1)), "Div": (1, (1,))}
