"""Undo a correction of biases: put the previous biases back. The result must equal the model before the correction."""

from __future__ import annotations

import onnx

from penstock.artifact import Artifact
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames

_BIASES = {"Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "Add": (0, 1)}
"""The inputs that the correction may change if they are constant."""


def uncorrected(made: onnx.ModelProto, source: Artifact) -> onnx.ModelProto:
    """Put the biases of the quantised model ``source`` into ``made``, its version with corrected biases."""
    biases = _Biases(read_proto(source).graph, FreshNames(made.graph))
    for node in made.graph.node:
        old = biases.nodes.get(node.output[0])
        for place in _BIASES.get(node.op_type, ()) if old is not None and old.op_type == node.op_type else ():
            assert old is not None
            name = old.input[place] if place < len(old.input) else ""
            if biases.has(name):
                before, after = node.input[:place], node.input[place + 1 :]
                node.input[:] = [*before, biases.copy(name), *after]
            elif not name:
                del node.input[place:]
    nodes = [*biases.dequantised.values(), *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(biases.constants.values())
    return made


class _Biases:
    """The constants of a graph, and copies of some of them under other names."""

    def __init__(self, graph: onnx.GraphProto, fresh: FreshNames) -> None:
        """``fresh`` names the copies."""
        self.nodes = {node.output[0]: node for node in graph.node}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.constants: dict[str, onnx.TensorProto] = {}
        self.dequantised: dict[str, onnx.NodeProto] = {}
        self._fresh, self._copies = fresh, dict[str, str]()

    def has(self, name: str) -> bool:
        """True if ``name`` is a constant, or a dequantised constant."""
        node = self.nodes.get(name)
        return name in self._tensors or (node is not None and all(one in self._tensors for one in node.input))

    def copy(self, name: str) -> str:
        """The name of a copy of the constant ``name``."""
        if name in self._copies:
            return self._copies[name]
        copied = self._copies[name] = self._fresh(f"{name}_before_correction")
        if name in self._tensors:
            tensor = self.constants[name] = onnx.TensorProto()
            tensor.CopyFrom(self._tensors[name])
            tensor.name = copied
        else:
            node = self.dequantised[name] = onnx.NodeProto()
            node.CopyFrom(self.nodes[name])
            node.name = ""  # the model may still have the node
            node.input[:] = [self.copy(one) for one in node.input]
            node.output[0] = copied
        return copied
