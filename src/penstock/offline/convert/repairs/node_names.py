"""Give every node a name of its own. ONNX Runtime refuses a graph in which two nodes have the same name."""

from __future__ import annotations

import onnx

from penstock.offline.convert.repairs.graphs import graphs_of, some


def repair(proto: onnx.ModelProto) -> str:
    renamed: list[str] = []
    for graph in graphs_of(proto.graph):
        taken = {node.name for node in graph.node}
        seen: set[str] = set()
        for number, node in enumerate(graph.node):
            if node.name and node.name in seen:
                renamed.append(node.name)
                while node.name in taken:
                    node.name = f"{node.name}_{number}"
                taken.add(node.name)
            seen.add(node.name)
    return f"several nodes had the same name: {some(renamed)}" if renamed else ""
