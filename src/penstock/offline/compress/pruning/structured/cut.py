"""Find the channels that can be cut from a model, and cut them: slice weights and rewrite constant shapes in the ONNX graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.pruning.prepare import prepare
from penstock.offline.compress.pruning.structured import channels, heads
from penstock.offline.compress.pruning.structured.channels import replace_constant
from penstock.offline.compress.pruning.structured.coupling import (
    ChannelGroup,
    ChannelSlot,
    Count,
    Coupling,
    Labels,
    Rule,
    describe,
)
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import to_artifact
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.tensor import Array

Kept = Mapping[str, Sequence[int]]
"""The indices of the units to keep, by group. In groups that are not listed, every unit is kept."""

_RULES: dict[str, Rule] = {**channels.RULES, **heads.RULES}


class Structure:
    """Finds and cuts a model's groups of channels, and the constants that depend on each group.

    ``exact`` freezes channels that a LayerNormalization or a mean includes, since their removal would change other results. Raises the
    errors of ``load_model``.
    """

    def __init__(self, artifact: Artifact, *, exact: bool = True) -> None:
        self.artifact = artifact
        self.exact = exact
        self.model = prepare(artifact)
        self.coupling = _analyse(self.model, exact=exact)
        self.slots = self.coupling.slots
        self.groups = tuple(self.coupling.groups())

    def group(self, name: str) -> ChannelGroup:
        """The group called ``name``. Raises InvalidArgument if there is none."""
        names = [group.name for group in self.groups]
        if name not in names:
            raise InvalidArgument(f"the model has no group '{name}'", f"its groups: {', '.join(names)}")
        return self.groups[names.index(name)]

    def explain(self) -> list[str]:
        """One line per group: its layers, the number of units that can be cut, and the reason why other units cannot be cut."""
        lines = []
        for group in self.groups:
            free = group.units - len(group.frozen)
            because = f"; the rest must stay because {group.reason}" if group.frozen else ""
            unit = "channels" if group.unit_size == 1 else f"units of {group.unit_size} channels"
            lines.append(f"{', '.join(group.layers)}: {free} of {group.units} {unit} can be cut{because}")
        return lines

    def unit_numbers(self, name: str, labels: Labels) -> Labels:
        """For each position of an axis, the number of its unit in group ``name``, or -1 if it belongs to another group."""
        units = self.group(name).roots
        order = np.argsort(units)
        roots = self.coupling.roots(labels)
        at = np.searchsorted(units, roots, sorter=order).clip(max=len(units) - 1)
        return np.where(units[order[at]] == roots, order[at], -1)

    def count(self, kept: Kept) -> Count:
        """A function that marks the positions of an axis that are kept.

        Raises InvalidArgument if ``kept`` names an unknown unit, leaves out a frozen unit, or is empty.
        """
        gone: list[int] = []
        for name, numbers in kept.items():
            group = self.group(name)
            chosen = set(numbers)
            if not chosen or not chosen <= set(range(group.units)) or not chosen >= set(group.frozen):
                raise InvalidArgument(
                    f"cannot keep {len(chosen)} unit(s) of '{name}', which has {group.units}",
                    f"keep at least one unit, and all frozen units; units have numbers from 0 to {group.units - 1}",
                )
            gone += np.delete(group.roots, list(chosen)).tolist()
        missing = np.array(gone, np.int64)
        return lambda labels: ~np.isin(self.coupling.roots(labels), missing)

    def cut(self, kept: Kept) -> Artifact:
        """The model with only the units in ``kept``. Raises InvalidArgument if a tensor would lose all channels."""
        fresh = Structure(self.artifact, exact=self.exact)  # the graph is edited in place
        count = fresh.count(kept)
        for value, axes in fresh.coupling.axes.items():
            if any(labels is not None and len(labels) and not count(labels).any() for labels in axes):
                raise InvalidArgument(f"no channel of '{value.name}' would be left", "keep at least one channel")
        _slice_constants(fresh.slots, count)
        for edit in fresh.coupling.edits:
            edit(count)
        for node in fresh.model.graph:
            for output in node.outputs:
                if not output.is_graph_output():
                    output.shape = None
        DeadCode().call(fresh.model)
        return to_artifact(fresh.model)


def _analyse(model: ir.Model, *, exact: bool = True) -> Coupling:
    """The coupling of a model with inferred shapes.

    If Reshape splits channels into several axes ([heads, size], [3, width]), the units can belong to either of two axes. The second
    axis is tried for the units that would be frozen with the first axis, then for all units. The result is the analysis with the most
    free channels and, among equals, the one with the most units.
    """
    first = best = _follow(model, exact, frozenset())
    frozen = [node for node, labels in first.choices.items() if any(first.reason(int(atom)) for atom in labels)]
    for otherwise in (frozen, list(first.choices)):
        if otherwise and _freedom(other := _follow(model, exact, frozenset(otherwise))) > _freedom(best):
            best = other
    return best


def _freedom(coupling: Coupling) -> tuple[int, int]:
    """The quality of an analysis: the number of channels that can be cut, then the number of units that they form."""
    made = [coupling.roots(slot.labels) for slot in coupling.slots if slot.role == "makes"]
    free = [root for roots in made for root in roots.tolist() if not coupling.reason(root)]
    return len(free), len(set(free))


def _follow(model: ir.Model, exact: bool, second_choice: frozenset[ir.Node]) -> Coupling:
    coupling = Coupling(graph.opset(model), second_choice)
    for node in model.graph:
        rule = _RULES.get(node.op_type) if node.domain == "" and not graph.has_subgraph(node) else None
        try:
            if rule is None:
                raise Unsupported(f"{describe(node)} has no rule")
            rule(coupling, node)
        except Unsupported as error:
            _freeze(coupling, node.inputs, error.message)
            for value in node.outputs:
                coupling.axes[value] = [None] * (graph.rank(value) or 0)
    for subgraph in model.graph.subgraphs():
        if subgraph is not model.graph:
            captured = [value for node in subgraph for value in node.inputs if value in coupling.axes]
            _freeze(coupling, captured, "a subgraph reads them")
    _freeze(coupling, model.graph.outputs, "an output of the model depends on them")
    if exact:
        coupling.freeze_blurred()
    coupling.freeze_units()
    _keep_something(coupling)
    return coupling


def _freeze(coupling: Coupling, values: Iterable[ir.Value | None], reason: str) -> None:
    for value in values:
        for labels in coupling.read(value):
            coupling.freeze(labels, reason)


def _keep_something(coupling: Coupling) -> None:
    """Freeze the first unit of every separate part of a group, so that each part, such as a half after Split, keeps a channel."""
    groups = [set(group.roots.tolist()) for group in coupling.groups()]
    for value, axes in coupling.axes.items():
        for labels in axes:
            mine = set() if labels is None else set(coupling.roots(labels).tolist())
            whole = any(group <= mine for group in groups) or any(coupling.reason(root) for root in mine)
            if labels is not None and mine and not whole:
                coupling.freeze(labels[:1], f"'{value.name}' must keep a channel")


def _slice_constants(slots: Sequence[ChannelSlot], count: Count) -> None:
    """Slice every use of a constant. Uses with equal slices continue to share one constant."""
    cuts: dict[ir.Value, dict[tuple[ir.Node, int], dict[int, Array]]] = defaultdict(lambda: defaultdict(dict))
    for slot in slots:
        kept = count(slot.labels)
        axes = cuts[slot.value][slot.node, slot.operand]
        axes[slot.axis] = axes[slot.axis] & kept if slot.axis in axes else kept
    for value, uses in cuts.items():
        array = graph.constant(value)
        assert array is not None
        sliced = [_sliced(array, axes) for axes in uses.values()]
        alike = all(other.shape == sliced[0].shape and np.array_equal(other, sliced[0]) for other in sliced[1:])
        if alike and len(uses) == len(value.uses()):
            value.const_value = ir.Tensor(sliced[0], name=value.name)
            value.shape = ir.Shape(sliced[0].shape)
            continue
        for (node, index), part in zip(uses, sliced, strict=True):
            replace_constant(node, index, part)


def _sliced(array: Array, axes: Mapping[int, Array]) -> Array:
    for axis, kept in axes.items():
        array = np.compress(kept, array, axis=axis)
    return np.ascontiguousarray(array)
