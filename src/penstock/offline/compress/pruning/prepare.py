"""Prepare a model for analysis: shapes become constants, weights become initialisers, and each transpose becomes one node."""

from __future__ import annotations

import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import infer_shapes, read_proto, to_proto
from penstock.offline.optimize.passes.constant_folding import ConstantFolding
from penstock.offline.optimize.passes.dead_code import DeadCode


def prepare(artifact: Artifact) -> ir.Model:
    """Read an equivalent model with constants folded, constant Identity nodes removed, and shapes inferred.

    Raises the errors of ``read_proto``.
    """
    model = infer_shapes(read_proto(artifact))
    ConstantFolding().call(model)
    for node in graph.plain_nodes(model):
        source = node.inputs[0] if node.op_type == "Identity" else None
        if source is not None and graph.is_constant(source):
            graph.replace_by_input(node, source)
        _one_transpose(node)
    DeadCode().call(model)
    return infer_shapes(to_proto(model))


def _one_transpose(last: ir.Node) -> None:
    """Replace Reshape to [-1, a, b], Transpose, Reshape to […, b, a] by one Transpose of the last two axes.

    Exporters write attention keys in this form if the batch size is free.
    """
    middle = _before(last, "Reshape")
    first = _before(middle, "Transpose")
    source = first.inputs[0] if first is not None and first.op_type == "Reshape" else None
    if middle is None or first is None or source is None or graph.ints_attribute(middle, "perm") != [0, 2, 1]:
        return
    before, flat, after = (_dims(value) for value in (source, first.outputs[0], last.outputs[0]))
    swapped = [*before[:-2], *before[-1:], *before[-2:-1]]
    if len(before) < 3 or None in before or len(flat) != 3 or flat[1:] != before[-2:] or after != swapped:
        return
    order = [*range(len(before) - 2), len(before) - 1, len(before) - 2]
    graph.replace_pair(middle, last, "Transpose", [source], [ir.AttrInt64s("perm", order)])


def _before(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """The producer of the input of ``node``, if ``node`` is of type ``op_type`` and is the only consumer of that input."""
    source = node.inputs[0] if node is not None and node.op_type == op_type and node.domain == "" else None
    if source is None or graph.sole_consumer(source) is None:
        return None
    return source.producer()


def _dims(value: ir.Value) -> list[int | str | None]:
    return [] if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims]
