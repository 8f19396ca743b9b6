"""The latency table: the time of each layer of a model at any width. Each layer is measured alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.pruning.structured.coupling import Count, Labels
from penstock.offline.compress.pruning.structured.cut import Kept, Structure
from penstock.offline.compress.taps import Taps
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.sessions import loaded
from penstock.perf.measure import feed, interleave
from penstock.tensor import Array

_SECONDS = 0.04
"""Seconds for measuring one layer at one width."""

_Axes = list[tuple[Labels | None, int]]
"""For each axis of an operand, its labels and its length."""


class TimedLayer(NamedTuple):
    """A layer with given widths: a key of the table. Equal layers take equal time."""

    node: bytes
    """Operator and attributes, serialised."""
    shapes: tuple[tuple[int, ...], ...]
    constant: tuple[bool, ...]


class LatencyTable:
    """The times in milliseconds of a model's layers at any width. A time is measured in ONNX Runtime when it is first needed.

    ``sample`` determines the shapes of activations. If a call needs several new widths, their runs are interleaved.
    """

    def __init__(
        self,
        structure: Structure,
        sample: Mapping[str, Array],
        threads: int,
        known: dict[TimedLayer, float] | None = None,
    ) -> None:
        """``known`` holds earlier measurements. New measurements are added to it."""
        self._structure, self._threads = structure, threads
        self._nodes = [node for node in structure.model.graph if form_of(node) is not None]
        names = [value.name for node in self._nodes for value in node.inputs if value and not graph.is_constant(value)]
        rows = len(next(iter(sample.values())))
        taps = Taps(structure.artifact, make_dataset(sample, None), batch_size=rows, threads=threads)
        self._shapes = taps.shapes([name for name in names if name], rows)
        self._axes = {node: [self._operand(node, index) for index in range(len(node.inputs))] for node in self._nodes}
        self._attributes = {node: ir.to_proto(node).attribute for node in self._nodes}
        self._opsets = [onnx.helper.make_opsetid(*item) for item in structure.model.opset_imports.items()]
        self._ms = {} if known is None else known

    def totals(self, plans: Sequence[Kept]) -> list[float]:
        """The total milliseconds of all layers for each plan. A plan lists the units to keep."""
        wanted = [[self._layer(node, count) for node in self._nodes] for count in map(self._structure.count, plans)]
        self._measure({layer for layers in wanted for layer in layers if layer not in self._ms})
        return [math.fsum(self._ms[layer] for layer in layers) for layers in wanted]

    def _operand(self, node: ir.Node, index: int) -> _Axes:
        value = node.inputs[index]
        if value is None:
            return []
        array = graph.constant(value)
        if array is None:
            return list(zip(self._structure.coupling.read(value), self._shapes[value.name or ""], strict=True))
        axes: _Axes = [(None, length) for length in array.shape]
        for slot in self._structure.slots:
            if slot.node is node and slot.operand == index:
                axes[slot.axis] = slot.labels, array.shape[slot.axis]
        return axes

    def _layer(self, node: ir.Node, count: Count) -> TimedLayer:
        operands = self._axes[node]
        shapes = tuple(
            tuple(length if labels is None else int(count(labels).sum()) for labels, length in axes)
            for axes in operands
        )
        proto = onnx.NodeProto(op_type=node.op_type, attribute=self._attributes[node])
        groups = graph.int_attribute(node, "group", 1)
        for attribute in proto.attribute:
            if attribute.name == "group" and groups > 1:
                attribute.i = groups * shapes[0][1] // operands[0][1][1]
        constant = tuple(graph.is_constant(value) for value in node.inputs)
        return TimedLayer(proto.SerializeToString(deterministic=True), shapes, constant)

    def _measure(self, layers: set[TimedLayer]) -> None:
        rng = np.random.default_rng(0)
        named = {str(number): layer for number, layer in enumerate(sorted(layers))}
        runs: dict[str, Callable[[], object]] = {}
        with contextlib.ExitStack() as stack:
            for name, layer in named.items():
                model = stack.enter_context(loaded(self._model(layer), self._threads))
                given = [shape for shape, constant in zip(layer.shapes, layer.constant, strict=True) if not constant]
                inputs = zip(model.signature.input_names, given, strict=True)
                runs[name] = feed(model, {key: rng.standard_normal(shape, np.float32) for key, shape in inputs})
            timings = interleave(runs, _SECONDS * len(runs)) if runs else {}
        # A low quantile excludes disturbances, since layers that are compared may be measured at different times.
        self._ms.update({named[name]: timing.percentile_ms(10) for name, timing in timings.items()})

    def _model(self, layer: TimedLayer) -> Artifact:
        """A model that consists of the layer, with random weights."""
        node = onnx.NodeProto.FromString(layer.node)
        node.input.extend(f"x{index}" for index in range(len(layer.shapes)))
        node.output.append("y")
        rng = np.random.default_rng(0)
        weights, inputs = [], []
        for name, shape, constant in zip(node.input, layer.shapes, layer.constant, strict=True):
            if constant:
                weights.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
            else:
                inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        body = onnx.helper.make_graph([node], "layer", inputs, [output], weights)
        made = onnx.helper.make_model(body, opset_imports=self._opsets, ir_version=self._structure.model.ir_version)
        return artifact_of(made)
