"""Which channels of a model depend on one another, and so can only be cut together.

Every position of an axis carries an *atom*. A layer with constant weights makes new atoms for its outputs; every operator
hands the atoms of its inputs on, and joins those that it brings together: Add joins the channels of its operands one by one,
Concat strings them together, Flatten repeats each, a depthwise convolution hands them on, Reshape to heads joins those of one
head. Joined atoms are a *unit*: what can be cut, everywhere at once. Units that some layer computes side by side are a *group*,
of which a width can be chosen. (A finer form of the dependency graph of Fang et al., "DepGraph: Towards Any Structural
Pruning", 2023: there layers are joined, here single positions, so that Concat, Split and Flatten need no index arithmetic.)

What an operator does not say it understands is never cut: its atoms are frozen, and the reason kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.tensor import Array

Labels = Array
"""One atom per position of an axis, int64 [length]."""
Axes = list[Labels | None]
"""The axes of a tensor; None is an axis that is never cut."""
Count = Callable[[Labels], Array]
"""Which positions of an axis are kept: booleans [length]."""


class ChannelSlot(NamedTuple):
    """An axis of a constant, such as a weight, whose positions go with the units of ``labels``."""

    node: ir.Node
    operand: int
    """Which input of ``node`` the constant is."""
    axis: int
    labels: Labels
    role: Literal["makes", "reads", "goes along"]
    """Whether the layer computes these channels, sums over them, or treats each alone (biases of layers included)."""

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.operand]
        assert value is not None
        return value


class ChannelGroup(msgspec.Struct, frozen=True):
    """Units side by side: all that can be said about the width of the layers that compute them."""

    name: str
    """The first layer of ``layers``."""
    layers: tuple[str, ...]
    """By the names of their outputs, in the graph's order."""
    units: int
    unit_size: int
    """Channels of the first layer in one unit: 1, the size of a head, or that of a convolution's group."""
    frozen: tuple[int, ...]
    """The units that cannot be cut."""
    reason: str
    """Why not; empty if all can be cut."""

    @property
    def cuttable(self) -> bool:
        return len(self.frozen) < self.units and self.units > 1

    @property
    def width(self) -> int:
        """Channels of the first layer."""
        return self.units * self.unit_size


class Coupling:
    """The atoms of a graph while the rules of its operators run, and afterwards its units and groups."""

    def __init__(self, opset: int, second_choice: Collection[ir.Node] = ()) -> None:
        self.opset = opset
        self.second_choice = second_choice
        """Nodes of ``choices`` that shall choose otherwise."""
        self.choices: dict[ir.Node, Labels] = {}
        """Nodes that could have laid the units along another axis, and the units that they made."""
        self.axes: dict[ir.Value, Axes] = {}
        self.slots: list[ChannelSlot] = []
        self.edits: list[Callable[[Count], None]] = []
        """Other changes of the graph that follow from the widths: constant shapes, sizes of parts, attributes."""
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}
        self._blurred: dict[int, str] = {}
        self._units_of: Labels | None = None

    def freeze_units(self) -> None:
        """No more is joined: units are found by one look-up from now on."""
        self._units_of = np.array([self._root(atom) for atom in range(len(self._parent))], np.int64)

    def fresh(self, length: int) -> Labels:
        """Atoms of their own for an axis."""
        start = len(self._parent)
        self._parent.extend(range(start, start + length))
        return np.arange(start, start + length)

    def fixed(self, length: int, reason: str) -> Labels:
        """Labels of positions that stay."""
        labels = np.repeat(self.fresh(1), length)
        self.freeze(labels, reason)
        return labels

    def join(self, first: Labels, second: Labels) -> None:
        """Position by position; both have one length, or one of them has length 1."""
        for pair in zip(*np.broadcast_arrays(first, second), strict=True):
            stays, goes = sorted(self._root(int(atom)) for atom in pair)
            if stays == goes:
                continue
            self._parent[goes] = stays
            for notes in (self._reasons, self._blurred):
                if goes in notes:
                    notes.setdefault(stays, notes.pop(goes))

    def freeze(self, labels: Labels | None, reason: str) -> None:
        """Mark these positions as not to be cut; the first reason is kept."""
        for root in self.roots(labels).tolist() if labels is not None else ():
            self._reasons.setdefault(root, reason)

    def blur(self, labels: Labels | None, reason: str) -> None:
        """Say that these positions cannot be cut without a trace even if all they lead to is zero."""
        for root in self.roots(labels).tolist() if labels is not None else ():
            self._blurred.setdefault(root, reason)

    def freeze_blurred(self) -> None:
        for root, reason in self._blurred.items():
            self._reasons.setdefault(self._root(root), reason)

    def roots(self, labels: Labels) -> Labels:
        """The unit of each position."""
        if self._units_of is not None:
            return np.asarray(self._units_of[labels])
        return np.array([self._root(int(atom)) for atom in labels], np.int64)

    def reason(self, unit: int) -> str:
        return self._reasons.get(self._root(unit), "")

    def read(self, value: ir.Value | None) -> Axes:
        """The axes of an operand; those of inputs, constants and what is left out are never cut."""
        if value is None:
            return []
        if value not in self.axes:
            self.axes[value] = [None] * (graph.rank(value) or 0)
        return self.axes[value]

    def write(self, value: ir.Value, axes: Axes) -> None:
        self.axes[value] = axes

    def slot(self, node: ir.Node, operand: int, axis: int, labels: Labels, role: str = "goes along") -> None:
        self.slots.append(ChannelSlot(node, operand, axis, labels, role))  # type: ignore[arg-type]

    def groups(self) -> list[ChannelGroup]:
        """Every group that a layer makes, in the graph's order; frozen ones too."""
        return [self._group(slots, roots) for slots, roots in self.members()]

    def members(self) -> list[tuple[list[ChannelSlot], Labels]]:
        """For each group the slots that make it, and its units in the order of their first appearance."""
        makers = [(slot, _unique(self.roots(slot.labels))) for slot in self.slots if slot.role == "makes"]
        found: list[tuple[list[ChannelSlot], Labels]] = []
        for slot, roots in makers:
            mine = [entry for entry in found if np.isin(roots, entry[1]).any()]
            slots = [other for entry in mine for other in entry[0]] + [slot]
            merged = _unique(np.concatenate([entry[1] for entry in mine] + [roots]))
            found = [entry for entry in found if all(entry is not other for other in mine)]
            found.append((slots, merged))
        return sorted(found, key=lambda entry: self.slots.index(entry[0][0]))

    def _group(self, slots: list[ChannelSlot], roots: Labels) -> ChannelGroup:
        names = tuple(dict.fromkeys(slot.node.outputs[0].name or "" for slot in slots))
        first = self.roots(slots[0].labels)
        frozen = tuple(number for number, root in enumerate(roots.tolist()) if self.reason(root))
        reason = self.reason(int(roots[frozen[0]])) if frozen else ""
        size = int((first == first[0]).sum())
        return ChannelGroup(names[0], names, len(roots), size, frozen, reason)

    def _root(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom


Rule = Callable[[Coupling, ir.Node], None]
"""Hands labels on from a node's inputs to its outputs. Raises Unsupported, before it changed anything, with what it does not
understand."""


def describe(node: ir.Node) -> str:
    return f"{node.op_type} '{node.outputs[0].name}'"


def freeze_all(coupling: Coupling, values: Iterable[ir.Value | None], reason: str) -> None:
    for value in values:
        for labels in coupling.read(value):
            coupling.freeze(labels, reason)


def forget(coupling: Coupling, values: Collection[ir.Value]) -> None:
    """Outputs about which nothing is known are never cut."""
    for value in values:
        coupling.write(value, [None] * (graph.rank(value) or 0))


def _unique(labels: Labels) -> Labels:
    """Without repetition, in the order of first appearance."""
    _, first = np.unique(labels, return_index=True)
    return np.asarray(labels[np.sort(first)])
