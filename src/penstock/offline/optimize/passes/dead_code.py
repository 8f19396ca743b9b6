"""Remove unused nodes and initialisers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import Pass


class DeadCode(Pass):
    """Remove nodes and initialisers that are not read by a node, a subgraph or the model's caller.

    Removed:

    1. Nodes of the standard operators, in reverse order, so that one run removes a whole dead branch.
    2. Initialisers.

    Not removed:

    3. Operators of other domains, which may have side effects, and nodes with subgraphs.
    4. Inputs of the graph and their default values, which are part of the model's signature.
    """

    name = "dead_code"

    def applications(self, model: ir.Model, skipped: Collection[str] = ()) -> Iterator[str]:
        for node in reversed(list(graph.plain_nodes(model))):  # Rule 3
            site = graph.site(node)
            if site not in skipped and not any(graph.is_used(output) for output in node.outputs):
                model.graph.remove(node, safe=True)  # Rule 1
                yield site
        for name, value in list(model.graph.initializers.items()):
            if name not in skipped and not graph.is_used(value) and not value.is_graph_input():  # Rule 4
                del model.graph.initializers[name]  # Rule 2
                yield name
