"""Sort the nodes of each graph, so that a node comes after those whose outputs it reads. Some exporters leave this out."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from penstock.offline.convert.repairs.graphs import bodies_of, graphs_of, set_nodes


def repair(proto: onnx.ModelProto) -> str:
    changed = 0
    for graph in graphs_of(proto.graph):
        order = list(_sorted(graph))
        if order != list(range(len(graph.node))) and len(order) == len(graph.node):
            set_nodes(graph, [graph.node[number] for number in order])
            changed += 1
    return f"the nodes of {changed} graph(s) were not in the order of execution" if changed else ""


def _sorted(graph: onnx.GraphProto) -> Iterator[int]:
    """The numbers of the nodes in a valid order that keeps the given one where possible. Nodes on a cycle are left out."""
    maker = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in _reads(node) if name in maker} for node in graph.node]
    state = [0] * len(needs)  # 1: waits for its inputs, 2: done
    for first in range(len(needs)):
        waiting = [first]
        while waiting:
            number = waiting[-1]
            missing = [other for other in needs[number] if state[other] == 0]
            if state[number] == 2 or (state[number] == 0 and missing):
                state[number] = state[number] or 1
                waiting = waiting[:-1] if state[number] == 2 else waiting + sorted(missing, reverse=True)
                continue
            waiting.pop()
            if all(state[other] == 2 for other in needs[number]):
                state[number] = 2
                yield number


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that ``node`` and its graphs read, which may include their own."""
    yield from node.input
    for body in bodies_of(node):
        for inner in body.node:
            yield from _reads(inner)
        yield from (value.name for value in body.output)
