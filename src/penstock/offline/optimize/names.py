"""Names of tensors: unused names for new tensors, and the tensors that a node and its subgraphs read."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir


class FreshNames:
    """Returns names for new tensors: never a name from the graph or its subgraphs, and never the same name twice."""

    def __init__(self, graph: onnx.GraphProto | ir.Graph) -> None:
        self._taken = set(_names_in(graph) if isinstance(graph, onnx.GraphProto) else _names_of(graph))

    def __call__(self, like: str) -> str:
        """``like`` if this name is unused, otherwise ``like`` with a number."""
        name, number = like, 1
        while name in self._taken:
            number += 1
            name = f"{like}_{number}"
        self._taken.add(name)
        return name


def _names_in(graph: onnx.GraphProto) -> Iterable[str]:
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        yield from (value.name for value in values)
    for node in graph.node:
        yield from (*node.input, *node.output)
        for inner in subgraphs(node):
            yield from _names_in(inner)


def _names_of(graph: ir.Graph) -> Iterable[str]:
    # Subgraphs share the namespace of their graph.
    for scope in (graph, *graph.subgraphs()):
        yield from scope.initializers
        yield from (f"{value.name}" for value in scope.inputs)
    yield from (f"{value.name}" for node in graph.all_nodes() for value in node.outputs)


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that ``node`` may run, such as the branches of an If."""
    return [
        graph
        for attribute in node.attribute
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else []))
    ]


def reads(node: onnx.NodeProto) -> set[str]:
    """The inputs of ``node`` and of all nodes in its subgraphs, including tensors that the subgraphs define."""
    within = [{value.name for value in graph.output}.union(*map(reads, graph.node)) for graph in subgraphs(node)]
    return set(node.input).union(*within) - {""}


def varying_outputs(graph: onnx.GraphProto) -> list[str]:
    """The outputs of ``graph`` that depend on its inputs."""
    varying = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if not varying.isdisjoint(reads(node)):
            varying.update(node.output)
    return [value.name for value in graph.output if value.name in varying]
