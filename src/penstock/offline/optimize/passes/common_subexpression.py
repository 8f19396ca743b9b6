"""Merge nodes and constants with equal values."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator

import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import Pass


class CommonSubexpression(Pass):
    """Merge equal constants and equal nodes. The first constant or node replaces all its copies.

    Merged (value numbering: Cocke and Schwartz, "Programming Languages and Their Compilers", 1970):

    1. Initialisers of equal type, shape and bytes.
    2. Nodes of the same standard operator with the same inputs, equal attributes (including tensors), and the same optional outputs.
       Nodes are visited in order, so equal chains merge as a whole.

    Not merged:

    3. Operators whose outputs may differ for the same inputs, other domains, and nodes with subgraphs.
    4. Graph inputs and outputs, which keep their own tensors.
    """

    name = "common_subexpression"

    def applications(self, model: ir.Model, skipped: Collection[str] = ()) -> Iterator[str]:
        yield from _merge_constants(model.graph, skipped)
        yield from _merge_nodes(model, skipped)


def _merge_constants(model_graph: ir.Graph, skipped: Collection[str]) -> Iterator[str]:
    first: dict[Hashable, ir.Value] = {}
    kinds = Counter(map(_kind, model_graph.initializers.values()))
    for name, value in list(model_graph.initializers.items()):
        tensor = value.const_value
        if name in skipped or tensor is None or not graph.is_constant(value) or value.is_graph_output():
            continue  # Rule 4
        if tensor.dtype == ir.DataType.STRING or kinds[_kind(value)] == 1:
            continue
        key = (*_kind(value), hashlib.sha256(tensor.tobytes()).digest())
        same = first.setdefault(key, value)
        if same is not value:
            value.replace_all_uses_with(same)  # Rule 1
            del model_graph.initializers[name]
            yield name


def _kind(value: ir.Value) -> tuple[Hashable, ...]:
    """The type and shape of a constant."""
    tensor = value.const_value
    return () if tensor is None else (tensor.dtype, tuple(tensor.shape.numpy()))


def _merge_nodes(model: ir.Model, skipped: Collection[str]) -> Iterator[str]:
    first: dict[Hashable, ir.Node] = {}
    for node in graph.plain_nodes(model):  # Rule 3
        site = graph.site(node)
        if site in skipped or node.op_type in graph.NON_DETERMINISTIC:
            continue  # Rule 3
        same = first.setdefault(_key(node), node)
        if same is node or any(output.is_graph_output() for output in node.outputs):
            continue  # Rule 4
        for output, replacement in zip(node.outputs, same.outputs, strict=True):
            output.replace_all_uses_with(replacement)  # Rule 2
        model.graph.remove(node, safe=True)
        yield site


def _key(node: ir.Node) -> Hashable:
    inputs = tuple(None if value is None else id(value) for value in node.inputs)
    outputs = tuple(bool(output.name) for output in node.outputs)
    attributes = sorted(
        (name, ir.to_proto(attribute).SerializeToString(deterministic=True))
        for name, attribute in node.attributes.items()
    )
    return node.op_type, inputs, outputs, tuple(attributes)
