"""``TreeArrays``: an ensemble of trees as arrays, in which a source and its ONNX model can be compared number by number."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from penstock.tensor import Array

LEAF, AT_MOST, BELOW, ABOVE, AT_LEAST, IN_SET = range(6)
"""Kinds of nodes: a leaf, or the comparison of a feature with a threshold or with a set of categories."""
MOST_NODES = 1 << 24
"""Larger ensembles are compared by rows only."""


class TreeArrays(msgspec.Struct, frozen=True):
    """The nodes of all trees, one after the other; children and roots are positions in these arrays."""

    roots: Array
    """int64 [trees]."""
    kind: Array
    """int64 [nodes]: one of the kinds above."""
    feature: Array
    """int64 [nodes]; any value for leaves."""
    threshold: Array
    """float64 [nodes]; any value for leaves and sets."""
    yes: Array
    """int64 [nodes]: the child if the comparison holds; -1 for leaves."""
    no: Array
    missing_yes: Array
    """bool [nodes]: True where NaN counts as if the comparison held."""
    set_node: Array
    """int64 [members]: the node of each member of a set."""
    set_member: Array
    """float64 [members]."""
    leaf: Array
    """int64 [values]: the leaf of each value."""
    target: Array
    """int64 [values]: the output that the value is added to."""
    value: Array
    """float64 [values]."""
    base: Array
    """float64 [targets]: the outputs before the first tree."""

    @property
    def is_valid(self) -> bool:
        """False if the arrays contradict each other, as those of an untrusted process may."""
        nodes = (self.kind, self.feature, self.threshold, self.yes, self.no, self.missing_yes)
        groups = ((self.roots,), nodes, (self.set_node, self.set_member), (self.leaf, self.target, self.value))
        count = self.kind.size
        places = (self.roots, self.yes, self.no, self.set_node, self.leaf)
        whole = (*places, self.kind, self.feature, self.target)
        return (
            all(array.shape == group[0].shape and array.ndim == 1 for group in groups for array in group)
            and self.base.ndim == 1
            and all(array.dtype == np.int64 for array in whole)
            and all(array.dtype == np.float64 for array in (self.threshold, self.set_member, self.value, self.base))
            and self.missing_yes.dtype == np.bool_
            and all(((array >= -1) & (array < count)).all() for array in places)
            and not any((array < 0).any() for array in (self.roots, self.set_node, self.leaf))
            and bool(((self.yes >= 0) == (self.kind != LEAF)).all() and ((self.no >= 0) == (self.kind != LEAF)).all())
        )


@runtime_checkable
class HasTrees(Protocol):
    """A ``FrameworkModel`` that knows the trees of its source."""

    def trees(self) -> tuple[TreeArrays, ...]:
        """One entry for each ensemble of the export. Empty if the trees are unknown, or too many."""
        ...
