"""Rounding: the tensors that are rounded when some operators become integer, and the tensor that determines the range of each."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from penstock.offline.compress.ptq.qdq_placement import (
    ACTIVATIONS,
    LINEAR_OPS,
    FloatModel,
    QdqPlacement,
    attributes_of,
)
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.names import reads, subgraphs

_SHARING_OPS = frozenset(
    {"Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split", "Pad", "MaxPool", "AveragePool"}
)
"""Operators whose results have the scale and zero point of their first input."""


class Rounding:
    """The tensors that are rounded when ``nodes``, given in graph order, become integer.

    ``clips_exactly`` is False if a range may be widened below, so that it cannot replace a Clip with a negative lower bound.
    """

    def __init__(
        self,
        model: FloatModel,
        nodes: Iterable[onnx.NodeProto],
        placement: QdqPlacement,
        clips_exactly: bool = True,
    ) -> None:
        self._model, self._clips_exactly = model, clips_exactly
        self._float_outputs = placement.float_outputs
        nodes = list(nodes)
        self._biases = {node.name for node in nodes if model.is_bias(node)}
        """The nodes that add a bias to a matrix product. Engines do both in one kernel, so nothing is rounded between them."""
        self._read = {name for node in nodes if node.name not in self._biases for name in node.input}
        self.sources: dict[str, str] = {}
        """For each rounded tensor, the tensor whose range it uses: itself, or the input of a Reshape, pooling or similar operator."""
        self.absorbed: dict[str, str] = {}
        """For each tensor that only a Relu or Clip reads, the operator's output. Rounding to the output's range clips the tensor."""
        self.removed: set[str] = set()
        """Names of the Relu and Clip nodes that clipping to a range replaces."""
        written: set[str] = set()
        for node in nodes:
            self._add(node, written)
            written.update(node.output)

    def moved_into_subgraphs(self) -> set[str]:
        """Tensors that a float operator transposes, reshapes or pools for a subgraph.

        ONNX Runtime 1.31 crashes the process when it moves a DequantizeLinear past such an operator.
        """
        found, captured = set[str](), set[str]()
        for graph in (inner for node in self._model.nodes for inner in subgraphs(node)):
            captured.update((value.name for value in graph.output), *map(reads, graph.node))
        for node in reversed(self._model.nodes):
            if node.op_type in _SHARING_OPS | {"Identity"} and not captured.isdisjoint(node.output):
                captured.add(node.input[0])
                found.add(node.input[0])
        return found

    def constant_inputs(self, node: onnx.NodeProto) -> list[int]:
        """The indices of the constant FP32 inputs of ``node`` that are rounded like activations."""
        if node.op_type in LINEAR_OPS | ACTIVATIONS | _SHARING_OPS or node.name in self._biases:
            return []
        return [place for place, name in enumerate(node.input) if name in self._model.weights]

    def _add(self, node: onnx.NodeProto, written: set[str]) -> None:
        first = node.input[0]
        if node.op_type in ACTIVATIONS:
            if first not in self.sources:
                return
            is_alone = first in written and self.sources[first] == first and self._model.readers[first] == 1
            if is_alone and (self._clips_exactly or self._model.bounds(node)[0] == 0):
                del self.sources[first]
                self.absorbed[first] = node.output[0]
                self.removed.add(node.name)
            self._mark(node.output)
        elif node.name in self._biases:
            self._mark(node.output)
        elif node.op_type in _SHARING_OPS:
            if first in self.sources or node.op_type in ("Split", "Pad"):
                self._mark([first])
                self._mark(node.output, self.sources.get(first) if _keeps_values(node, self._model) else None)
        else:
            self._mark(node.input)
            # The integer kernels of matrix products and of ConvTranspose return floats at no cost.
            is_rounded = node.op_type not in ("MatMul", "ConvTranspose") or node.output[0] in self._read
            if node.op_type not in self._float_outputs and is_rounded:
                self._mark(node.output)

    def _mark(self, tensors: Iterable[str], source: str | None = None) -> None:
        for name in self._model.tensors(tensors):
            self.sources.setdefault(name, source or name)


def _keeps_values(node: onnx.NodeProto, model: FloatModel) -> bool:
    """False if ``node`` pads with values other than zero; otherwise True."""
    if node.op_type != "Pad" or attributes_of(node).get("mode", b"constant") != b"constant":
        return True
    value = node.input[2] if len(node.input) > 2 else ""
    return not value or (value in model.weights and not array_of(model.weights[value]).any())
