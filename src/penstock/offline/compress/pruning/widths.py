"""Which widths: the same share of every group, or those that lose least for the milliseconds that they save.

FLOPs are no guide on a CPU: kernels work in blocks of 8 or 16 channels, so that 45 of 64 channels are slower than 48, and a
layer may be bound by memory. So widths are multiples of a block, and each layer is measured at the widths in question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.pruning.coupling import Group, Labels
from penstock.offline.compress.pruning.cut import Kept, Structure
from penstock.offline.compress.pruning.importance import Scores
from penstock.offline.compress.taps import Taps
from penstock.offline.dataset import make_dataset
from penstock.offline.optimize import graph
from penstock.perf.measure import feed, interleave
from penstock.tensor import Array

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_SECONDS = 0.04
"""For which a layer is measured at one width."""
_TINY = 1e-9
_STEPS = 8
"""Into about how many steps a group's width is divided in the search."""

Counts = Mapping[str, int]
"""By group, how many units stay; of those that are not named, all."""


def unit_step(group: Group, block: int) -> int:
    """The number of units in which a group is cut, so that widths are multiples of ``block``; less for a narrow group."""
    step = block // math.gcd(block, group.unit_size)
    while step > 1 and 4 * step > group.units:
        step //= 2
    return step


def uniform(structure: Structure, names: Iterable[str], width: float, block: int) -> dict[str, int]:
    """``width`` of the units of each group, rounded to the nearest step, and at least one step."""
    found = {}
    for name in names:
        group = structure.group(name)
        step = unit_step(group, block)
        found[name] = min(
            group.units, max(step, step * math.floor(group.units * width / step + 0.5), len(group.frozen))
        )
    return found


def best_units(structure: Structure, scores: Scores, counts: Counts) -> dict[str, list[int]]:
    """The units of highest score, frozen ones first of all; of equal ones those that come first."""
    kept = {}
    for name, count in counts.items():
        rank = scores[name].copy()
        rank[list(structure.group(name).frozen)] = np.inf
        kept[name] = sorted(np.argsort(-rank, kind="stable")[:count].tolist())
    return kept


class _Axis(NamedTuple):
    """An axis of an operand: how many positions are of no group, and of which units the others are."""

    fixed: int
    parts: tuple[tuple[str, Array], ...]

    def length(self, masks: Mapping[str, Array]) -> int:
        """``masks`` says of the units of some groups whether they stay; all others do."""
        return self.fixed + sum(
            int(masks[name][numbers].sum()) if name in masks else len(numbers) for name, numbers in self.parts
        )


class _Layer(NamedTuple):
    """A node at certain widths; equal ones take equal time."""

    node: bytes
    """Operator and attributes, serialised."""
    shapes: tuple[tuple[int, ...], ...]
    constant: tuple[bool, ...]


class LatencyTable:
    """Milliseconds of the layers of a model at any widths, each measured in ONNX Runtime when first asked for.

    ``sample`` gives the shapes of activations; the time is that of its rows. All widths of one question run interleaved.
    """

    def __init__(self, structure: Structure, sample: Mapping[str, Array], threads: int) -> None:
        self._structure, self._threads = structure, threads
        self._nodes = [node for node in structure.model.graph if node.op_type in _LAYERS and node.domain == ""]
        names = [value.name for node in self._nodes for value in node.inputs if value and not graph.is_constant(value)]
        taps = Taps(structure.artifact, make_dataset(dict(sample), None), batch_size=_rows(sample), threads=threads)
        self._shapes = {name: array.shape for name, array in taps.run([name for name in names if name])}
        self._axes = {node: [self._operand(node, index) for index in range(len(node.inputs))] for node in self._nodes}
        self._opsets = [onnx.helper.make_opsetid(*item) for item in structure.model.opset_imports.items()]
        self._ms: dict[_Layer, float] = {}

    def totals(self, plans: list[Kept]) -> list[float]:
        """Milliseconds of all layers together, for each of ``plans``."""
        wanted = [[self._layer(node, masks) for node in self._nodes] for masks in map(self._masks, plans)]
        self._measure({layer for layers in wanted for layer in layers if layer not in self._ms})
        return [math.fsum(self._ms[layer] for layer in layers) for layers in wanted]

    def _masks(self, plan: Kept) -> dict[str, Array]:
        masks = {name: np.zeros(self._structure.group(name).units, bool) for name in plan}
        for name, numbers in plan.items():
            masks[name][list(numbers)] = True
        return masks

    def _operand(self, node: ir.Node, index: int) -> list[_Axis]:
        value = node.inputs[index]
        if value is None:
            return []
        array = graph.constant(value)
        if array is None:
            labels = self._structure.coupling.read(value)
            shape = self._shapes[value.name or ""]
        else:
            shape = array.shape
            labels = [None] * array.ndim
            for slot in self._structure.slots:
                if slot.node is node and slot.operand == index:
                    labels[slot.axis] = slot.labels
        return [self._axis(label, length) for label, length in zip(labels, shape, strict=True)]

    def _axis(self, labels: Labels | None, length: int) -> _Axis:
        if labels is None:
            return _Axis(length, ())
        found = [(group.name, self._structure.unit_numbers(group.name, labels)) for group in self._structure.groups]
        parts = tuple((name, numbers[numbers >= 0]) for name, numbers in found if (numbers >= 0).any())
        return _Axis(length - sum(len(numbers) for _, numbers in parts), parts)

    def _layer(self, node: ir.Node, masks: Mapping[str, Array]) -> _Layer:
        operands = self._axes[node]
        shapes = tuple(tuple(axis.length(masks) for axis in operand) for operand in operands)
        proto = onnx.NodeProto(op_type=node.op_type, attribute=ir.to_proto(node).attribute)
        groups = graph.int_attribute(node, "group", 1)
        for attribute in proto.attribute:
            if attribute.name == "group" and groups > 1:
                attribute.i = groups * shapes[0][1] // operands[0][1].length({})
        constant = tuple(graph.is_constant(value) for value in node.inputs)
        return _Layer(proto.SerializeToString(deterministic=True), shapes, constant)

    def _measure(self, layers: set[_Layer]) -> None:
        ordered = sorted(layers)
        loaded = [get_engine("onnxruntime").load(self._model(layer), {"threads": self._threads}) for layer in ordered]
        rng = np.random.default_rng(0)
        runs: dict[str, Callable[[], object]] = {}
        for number, (layer, model) in enumerate(zip(ordered, loaded, strict=True)):
            given = [shape for shape, constant in zip(layer.shapes, layer.constant, strict=True) if not constant]
            names = model.signature.input_names
            runs[str(number)] = feed(
                model, {n: rng.standard_normal(s).astype(np.float32) for n, s in zip(names, given, strict=True)}
            )
        if runs:
            timings = interleave(runs, _SECONDS * len(runs))
            self._ms |= {layer: timings[str(number)].p50_ms for number, layer in enumerate(ordered)}
        for model in loaded:
            model.unload()

    def _model(self, layer: _Layer) -> Artifact:
        """A model of the layer alone, weights drawn at random."""
        node = onnx.NodeProto.FromString(layer.node)
        names = [f"x{index}" for index in range(len(layer.shapes))]
        node.input.extend(names)
        node.output.append("y")
        rng = np.random.default_rng(0)
        pairs = list(zip(names, layer.shapes, layer.constant, strict=True))
        weights = [
            onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
            for name, shape, constant in pairs
            if constant
        ]
        inputs = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape, constant in pairs
            if not constant
        ]
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        body = onnx.helper.make_graph([node], "layer", inputs, [output], weights)
        made = onnx.helper.make_model(body, opset_imports=self._opsets, ir_version=self._structure.model.ir_version)
        return Artifact.from_bytes(made.SerializeToString(deterministic=True))


def fastest_for_least(
    structure: Structure,
    scores: Scores,
    table: LatencyTable,
    widest: Counts,
    goal_ms: float,
    *,
    block: int,
    least: float,
) -> tuple[dict[str, int], float]:
    """Widths for which all layers together take ``goal_ms``, and what they take; greedy from ``widest`` down.

    Each step narrows the group that loses the least per millisecond saved; what it loses is the logarithm of the share of its
    score that stays, so that the last half of a group costs as much as the first. No group goes below ``least`` of its units.
    Stops early where nothing is left that would save time.
    """
    counts = dict(widest)
    (now,) = table.totals([best_units(structure, scores, counts)])
    while now > goal_ms:
        trials = [
            {**counts, name: to}
            for name in counts
            if (to := _narrower(structure.group(name), counts[name], block, least))
        ]
        plans = [best_units(structure, scores, trial) for trial in trials]
        before = _loss(scores, best_units(structure, scores, counts))
        options = [
            (_loss(scores, plan) - before, now - ms, trial)
            for plan, ms, trial in zip(plans, table.totals([*plans]), trials, strict=True)
            if ms < now
        ]
        if not options:
            break
        _lost, saved, counts = min(options, key=lambda option: option[0] / option[1])
        now -= saved
    return counts, now


def _narrower(group: Group, count: int, block: int, least: float) -> int:
    """The next width down; 0 if there is none."""
    step = unit_step(group, block)
    coarse = max(step, group.units // _STEPS // step * step)
    to = (count - 1) // coarse * coarse
    return to if to >= max(1, least * group.units, len(group.frozen)) else 0


def _loss(scores: Scores, plan: Kept) -> float:
    shares = (float(scores[name][list(numbers)].sum() / (scores[name].sum() or 1.0)) for name, numbers in plan.items())
    return -math.fsum(math.log(max(share, _TINY)) for share in shares)


def _rows(sample: Mapping[str, Array]) -> int:
    return len(next(iter(sample.values())))
