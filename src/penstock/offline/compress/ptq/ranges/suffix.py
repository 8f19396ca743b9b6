"""A separate model of all nodes that follow a tensor in a float model. The tensor can be rounded with any scale::

    value ── QuantizeLinear(scale, zero) ── DequantizeLinear ─┐
      └───────────────────────────────────────────────────────┴ Where(switch) ── t ── nodes after t ── outputs

To try a range, only this suffix runs, since tensors before the rounded tensor and on other branches do not change. To load fewer
models, a few later tensors share the suffix of the first tensor. Each tensor has its own switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.offline.compress.ptq.qdq_placement import FloatModel
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array, DataType


class _Names(NamedTuple):
    """The names of the tensors that are needed to round one tensor."""

    source: str
    """The tensor before it is rounded."""
    scale: str
    zero: str
    switch: str
    integer: str
    rounded: str


class Suffix:
    """All nodes of ``model`` that depend on ``tensor``."""

    def __init__(self, model: FloatModel, tensor: str) -> None:
        self._model = model
        self._fresh = FreshNames(model.proto.graph)
        self._names = [self._new_names(tensor)]
        self.tensors = [tensor]
        """The tensors that can be rounded: the first tensor, and some that nodes of the suffix compute."""
        reached, chosen = {tensor}, set[str]()
        for node in model.nodes:
            if not reached.isdisjoint(reads(node)):
                chosen.add(node.name)
                reached.update(filter(None, node.output))
        self.outputs = [name for name in model.output_names if name in reached]
        self.beside: list[str] = []
        """Other tensors that the nodes of the suffix read, in the order of the graph."""
        for node in reversed(model.nodes):
            if node.name in chosen:
                for name in sorted(reads(node) - reached - model.weights.keys()):
                    if name in model.values:
                        self.beside.append(name)
                    elif (
                        name in model.producers
                    ):  # an input needs a known type, so add the nodes that compute an untyped tensor
                        chosen.add(model.producers[name].name)
        self._nodes = [node for node in model.nodes if node.name in chosen]
        self._computed = {name for node in self._nodes for name in node.output}
        self.beside = [name for name in dict.fromkeys(reversed(self.beside)) if name not in self._computed]

    @property
    def read(self) -> list[str]:
        """The tensors that are inputs of the suffix."""
        return [self.tensors[0], *self.beside]

    def take(self, tensor: str) -> bool:
        """Add ``tensor`` to the tensors that can be rounded; False if no node of the suffix computes it."""
        if tensor in self._computed:
            self.tensors.append(tensor)
            self._names.append(self._new_names(tensor))
        return tensor in self._computed

    def rounded(
        self,
        model: LoadedModel,
        batches: Iterable[Mapping[str, Array]],
        tensor: str,
        range: Range,
        scheme: IntegerScheme,
    ) -> Iterator[dict[str, Array]]:
        """The outputs of each batch with ``tensor`` rounded to ``range``.

        ``model`` is the loaded ``artifact(scheme)``. ``batches`` hold the tensors in ``read``.
        """
        first = self._names[0].source
        values: dict[str, Array] = {}
        for names, name in zip(self._names, self.tensors, strict=True):
            low, high = (range.low, range.high) if name == tensor else (0.0, 0.0)
            scale, zero = scheme.parameters(np.array(low), np.array(high))
            numbers = (
                np.asarray(scale, np.float32),
                np.asarray(zero, scheme.activation.dtype),
                np.asarray(name == tensor),
            )
            values |= zip((names.scale, names.zero, names.switch), numbers, strict=True)
        for batch in batches:
            beside = {name: batch[name] for name in self.beside}
            yield dict(model.forward({first: batch[self.tensors[0]], **beside, **values}))

    def artifact(self, scheme: IntegerScheme) -> Artifact:
        """The model. Its inputs are the first tensor, ``beside``, and a scale, a zero point and a switch for each of ``tensors``."""
        inputs = [onnx.ValueInfoProto(name=self._names[0].source, type=self._model.values[self.tensors[0]].type)]
        for names in self._names:
            inputs += [
                helper.make_tensor_value_info(names.scale, DataType.FP32.onnx, []),
                helper.make_tensor_value_info(names.zero, scheme.activation.onnx, []),
                helper.make_tensor_value_info(names.switch, DataType.BOOL.onnx, []),
            ]
        inputs += [self._model.values[name] for name in self.beside]
        needed = set[str]().union(*map(reads, self._nodes))
        whole = self._model.proto
        proto = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
        proto.graph.name = "suffix"
        proto.graph.input.extend(inputs)
        proto.graph.node.extend([*_rounding(self._names[0], self.tensors[0]), *self._rounded_nodes()])
        proto.graph.output.extend(value for value in whole.graph.output if value.name in self.outputs)
        proto.graph.initializer.extend(tensor for tensor in whole.graph.initializer if tensor.name in needed)
        return artifact_of(proto)

    def _rounded_nodes(self) -> Iterator[onnx.NodeProto]:
        """The nodes, each followed by the rounding of its outputs."""
        names = dict(list(zip(self.tensors, self._names, strict=True))[1:])
        for node in self._nodes:
            rounded = [name for name in node.output if name in names]
            if rounded:
                node = onnx.NodeProto.FromString(node.SerializeToString())  # noqa: PLW2901 - a copy to rename outputs in
                node.output[:] = [names[name].source if name in rounded else name for name in node.output]
            yield node
            for name in rounded:
                yield from _rounding(names[name], name)

    def _new_names(self, tensor: str) -> _Names:
        return _Names(*(self._fresh(f"{tensor}_{field}") for field in _Names._fields))


def _rounding(names: _Names, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [names.source, names.scale, names.zero], [names.integer]),
        helper.make_node("DequantizeLinear", [names.integer, names.scale, names.zero], [names.rounded]),
        helper.make_node("Where", [names.switch, names.rounded, names.source], [target]),
    ]
