"""Coupling: find the channels of a model that depend on one another and can only be cut together.

Every position of an axis carries an *atom*. A layer with constant weights creates new atoms for its outputs. Every other operator
copies the atoms of its inputs to its outputs, and joins atoms if it combines their elements. For example, Add joins the first channels
of its operands, their second channels, and so on. Concat concatenates channels, Flatten repeats each channel, and a Reshape to heads
joins the atoms of each head. Joined atoms form a *unit*, which is removed from all tensors at once. The units that one layer computes
form a *group*, whose number of units can be chosen. (DepGraph, Fang et al., "Towards Any Structural Pruning", 2023, joins whole
layers. Joining single positions makes index arithmetic for Concat, Split and Flatten unnecessary.)

Operators without a rule are never cut: their atoms are frozen, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.tensor import Array

Labels = Array
"""One atom per position of an axis, int64 [length]."""
Axes = list[Labels | None]
"""The labels of each axis of a tensor; None stands for an axis that is never cut."""
Count = Callable[[Labels], Array]
"""Returns an array of booleans [length] for an axis: True for each position that is kept."""


class ChannelSlot(NamedTuple):
    """An axis of a weight or another constant, which is cut together with the units of ``labels``."""

    node: ir.Node
    operand: int
    """The index of the constant among the inputs of ``node``."""
    axis: int
    labels: Labels
    role: Literal["makes", "reads", "goes along"] = "goes along"
    """Use of the channels: computed by the layer ("makes"), summed over ("reads"), or handled separately, as by a bias."""

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.operand]
        assert value is not None
        return value


class ChannelGroup(msgspec.Struct, frozen=True, eq=False):
    """Units that the same layers compute. The number of units is the width of these layers."""

    layers: tuple[str, ...]
    """The layers, named after their outputs, in graph order."""
    roots: Labels
    """The root atoms of the units."""
    unit_size: int
    """Number of channels of the first layer that one unit contains: 1, the size of a head, or the size of a convolution's group."""
    frozen: tuple[int, ...]
    """Indices of the units that cannot be cut."""
    reason: str
    """The reason why some units cannot be cut; empty if all units can be cut."""

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.layers[0]

    @property
    def units(self) -> int:
        return len(self.roots)

    @property
    def cuttable(self) -> bool:
        return len(self.frozen) < self.units and self.units > 1


class Coupling:
    """Holds the atoms of a graph while the operators' rules run, and afterwards the units and groups."""

    def __init__(self, opset: int, second_choice: Collection[ir.Node] = ()) -> None:
        self.opset = opset
        self.second_choice = second_choice
        """The nodes in ``choices`` whose units are assigned to the second of the two possible axes."""
        self.choices: dict[ir.Node, Labels] = {}
        """The units of each node that could also be assigned to a second axis."""
        self.axes: dict[ir.Value, Axes] = {}
        self.slots: list[ChannelSlot] = []
        self.edits: list[Callable[[Count], None]] = []
        """Other changes of the graph after a cut: constant shapes, sizes of parts, attributes."""
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}
        self._blurred: dict[int, str] = {}
        self._units_of: Labels | None = None

    def freeze_units(self) -> None:
        """Finish the joining of atoms. After that, a single look-up finds the unit of an atom."""
        self._units_of = np.array([self._root(atom) for atom in range(len(self._parent))], np.int64)

    def fresh(self, length: int) -> Labels:
        """New atoms for an axis."""
        start = len(self._parent)
        self._parent.extend(range(start, start + length))
        return np.arange(start, start + length)

    def fixed(self, length: int, reason: str) -> Labels:
        """Labels of positions that cannot be cut."""
        labels = np.repeat(self.fresh(1), length)
        self.freeze(labels, reason)
        return labels

    def join(self, first: Labels, second: Labels) -> None:
        """Join two sequences of atoms position by position. The lengths are equal, or one of them is 1."""
        for pair in zip(*np.broadcast_arrays(first, second), strict=True):
            stays, goes = sorted(self._root(int(atom)) for atom in pair)
            if stays == goes:
                continue
            self._parent[goes] = stays
            for notes in (self._reasons, self._blurred):
                if goes in notes:
                    notes.setdefault(stays, notes.pop(goes))

    def freeze(self, labels: Labels | None, reason: str) -> None:
        """Mark positions that cannot be cut. The first reason is kept."""
        for root in self.roots(labels).tolist() if labels is not None else ():
            self._reasons.setdefault(root, reason)

    def blur(self, labels: Labels | None, reason: str) -> None:
        """Mark positions that a mean or norm includes. Their removal changes other results, even if their values are zero."""
        for root in self.roots(labels).tolist() if labels is not None else ():
            self._blurred.setdefault(root, reason)

    def freeze_blurred(self) -> None:
        """Freeze all blurred positions."""
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
        """The axes of an operand. Axes of inputs and constants are never cut."""
        if value is None:
            return []
        if value not in self.axes:
            self.axes[value] = [None] * (graph.rank(value) or 0)
        return self.axes[value]

    def write(self, value: ir.Value, axes: Axes) -> None:
        self.axes[value] = axes

    def groups(self) -> list[ChannelGroup]:
        """Every group, in graph order, including frozen ones."""
        makers = [slot for slot in self.slots if slot.role == "makes"]
        found: list[tuple[list[int], Labels]] = []
        for number, slot in enumerate(makers):
            numbers, units, apart = list[int](), list[Labels](), []
            roots = self.roots(slot.labels)
            for entry in found:
                if np.isin(roots, entry[1]).any():
                    numbers += entry[0]
                    units.append(entry[1])
                else:
                    apart.append(entry)
            together = np.concatenate([*units, roots])
            first = np.unique(together, return_index=True)[1]
            found = [*apart, ([*numbers, number], together[np.sort(first)])]
        found.sort(key=lambda entry: entry[0][0])
        return [self._group([makers[number] for number in numbers], roots) for numbers, roots in found]

    def _group(self, slots: list[ChannelSlot], roots: Labels) -> ChannelGroup:
        names = tuple(dict.fromkeys(slot.node.outputs[0].name or "" for slot in slots))
        first = self.roots(slots[0].labels)
        frozen = tuple(number for number, root in enumerate(roots.tolist()) if self.reason(root))
        reason = self.reason(int(roots[frozen[0]])) if frozen else ""
        return ChannelGroup(names, roots, int((first == first[0]).sum()), frozen, reason)

    def _root(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom


Rule = Callable[[Coupling, ir.Node], None]
"""Derives the labels of a node's outputs from its inputs. If it cannot, it raises Unsupported and changes nothing."""


def describe(node: ir.Node) -> str:
    return f"{node.op_type} '{node.outputs[0].name}'"
