"""What can be cut from a model, and the cut itself: weights sliced, constant shapes rewritten, all on the ONNX graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

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
    forget,
    freeze_all,
)
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import to_bytes
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.tensor import Array

Kept = Mapping[str, Sequence[int]]
"""By group, the numbers of the units that stay. A group that is not named stays whole."""

_RULES: dict[str, Rule] = {**channels.RULES, **heads.RULES}


class Structure:
    """A model's groups of channels, and the constants that depend on each.

    ``exact`` leaves alone what cannot be cut without changing what stays: channels that LayerNormalization or a mean runs over.
    The model is read with its constants folded, so that shapes stand in it as numbers.
    Raises InvalidModel and Unsupported as ``load_model``.
    """

    def __init__(self, artifact: Artifact, *, exact: bool = True) -> None:
        self.artifact = artifact
        self.exact = exact
        self.model = prepare(artifact)
        self.coupling = analyse(self.model, exact=exact)
        members = self.coupling.members()
        self.groups: tuple[ChannelGroup, ...] = tuple(self.coupling.groups())
        self._units: dict[str, Labels] = {
            group.name: roots for group, (_, roots) in zip(self.groups, members, strict=True)
        }

    @property
    def slots(self) -> list[ChannelSlot]:
        return self.coupling.slots

    def group(self, name: str) -> ChannelGroup:
        """Raises InvalidArgument if there is none of that name."""
        for group in self.groups:
            if group.name == name:
                return group
        raise InvalidArgument(f"the model has no group '{name}'", f"its groups: {', '.join(self._units)}")

    def explain(self) -> list[str]:
        """One line per group: its layers, the units that can be cut, and the reason why others cannot."""
        lines = []
        for group in self.groups:
            free = group.units - len(group.frozen)
            because = f"; the rest stays: {group.reason}" if group.frozen else ""
            unit = "channels" if group.unit_size == 1 else f"units of {group.unit_size} channels"
            lines.append(f"{', '.join(group.layers)}: {free} of {group.units} {unit} can be cut{because}")
        return lines

    def unit_numbers(self, name: str, labels: Labels) -> Labels:
        """For each position of an axis the number of its unit in group ``name``; -1 if it is not of that group."""
        units = self._units[name]
        order = np.argsort(units)
        roots = self.coupling.roots(labels)
        at = np.searchsorted(units, roots, sorter=order).clip(max=len(units) - 1)
        return np.where(units[order[at]] == roots, order[at], -1)

    def count(self, kept: Kept) -> Count:
        """Which positions of an axis stay under ``kept``. Raises InvalidArgument for units that are not, or must not be cut."""
        gone: list[int] = []
        for name, numbers in kept.items():
            group = self.group(name)
            chosen = set(numbers)
            if not chosen or not chosen <= set(range(group.units)) or not chosen >= set(group.frozen):
                raise InvalidArgument(
                    f"{len(chosen)} unit(s) of '{name}' are to stay, out of {group.units}",
                    f"keep at least one, numbers from 0 to {group.units - 1}, and all that are frozen",
                )
            gone += [int(root) for number, root in enumerate(self._units[name]) if number not in chosen]
        missing = np.array(gone, np.int64)
        return lambda labels: ~np.isin(self.coupling.roots(labels), missing)

    def cut(self, kept: Kept) -> bytes:
        """The model with only the units in ``kept``. Raises InvalidArgument if a tensor would have no channels left."""
        fresh = Structure(self.artifact, exact=self.exact)  # edited in place
        count = fresh.count(kept)
        for value, axes in fresh.coupling.axes.items():
            if any(labels is not None and len(labels) and not count(labels).any() for labels in axes):
                raise InvalidArgument(f"nothing would be left of '{value.name}'", "keep some of its channels")
        _slice_constants(fresh.slots, count)
        for edit in fresh.coupling.edits:
            edit(count)
        for node in fresh.model.graph:
            for output in node.outputs:
                if not output.is_graph_output():
                    output.shape = None
        DeadCode().call(fresh.model)
        return to_bytes(fresh.model)


def analyse(model: ir.Model, *, exact: bool = True) -> Coupling:
    """The coupling of a model whose values carry what shape inference found.

    Where Reshape splits channels into axes of which any could carry the units ([heads, size], [3, width]), a second choice is
    tried: for those that turn out frozen, then for all. The reading under which most can be cut, in finest units, is taken.
    """
    first = best = _follow(model, exact, frozenset())
    frozen = [node for node, labels in first.choices.items() if any(first.reason(int(atom)) for atom in labels)]
    for otherwise in (frozen, list(first.choices)):
        if otherwise and _freedom(other := _follow(model, exact, frozenset(otherwise))) > _freedom(best):
            best = other
    return best


def _freedom(coupling: Coupling) -> tuple[int, int]:
    """How many channels of all layers can be cut, and in how many units."""
    made = [coupling.roots(slot.labels) for slot in coupling.slots if slot.role == "makes"]
    free = [root for roots in made for root in roots.tolist() if not coupling.reason(root)]
    return len(free), len(set(free))


def _follow(model: ir.Model, exact: bool, second_choice: frozenset[ir.Node]) -> Coupling:
    coupling = Coupling(graph.opset(model), second_choice)
    for node in model.graph:
        rule = _RULES.get(node.op_type) if node.domain == "" and not graph.has_subgraph(node) else None
        try:
            if rule is None:
                raise Unsupported(f"{describe(node)} is not understood")
            rule(coupling, node)
        except Unsupported as error:
            freeze_all(coupling, node.inputs, error.message)
            forget(coupling, node.outputs)
    for subgraph in model.graph.subgraphs():
        if subgraph is not model.graph:
            captured = [value for node in subgraph for value in node.inputs if value in coupling.axes]
            freeze_all(coupling, captured, "a subgraph reads it")
    freeze_all(coupling, model.graph.outputs, "an output of the model is made of it")
    if exact:
        coupling.freeze_blurred()
    coupling.freeze_units()
    _keep_something(coupling)
    return coupling


def _keep_something(coupling: Coupling) -> None:
    """A part of a group that stands alone, such as a half after Split, must not lose all: its first unit stays."""
    groups = [set(roots.tolist()) for _, roots in coupling.members()]
    for value, axes in coupling.axes.items():
        for labels in axes:
            mine = set() if labels is None else set(coupling.roots(labels).tolist())
            whole = any(group <= mine for group in groups) or any(coupling.reason(root) for root in mine)
            if labels is not None and mine and not whole:
                coupling.freeze(labels[:1], f"something must be left of '{value.name}'")


def _slice_constants(slots: Sequence[ChannelSlot], count: Count) -> None:
    """Slice every use of a constant; uses that are sliced alike go on sharing it, in its old place if there are no others."""
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
