"""Ensembles of trees in double precision, and the rounding of their sums.

The kernel of an ensemble adds leaves in FP32. Its double-precision result comes from the numbers of the leaves, which the kernel
returns without rounding, and from a table of the leaves' values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from onnx import NodeProto, helper, numpy_helper

from penstock.tensor import Array

_LEAVES = ("target_treeids", "target_nodeids", "target_ids")


class Sums(NamedTuple):
    """The sums of the leaves [N, targets], and their error in units in the last place of 1."""

    values: Array
    error: Array
    """A sum of n terms is rounded n times, by a unit of its size so far. These errors add up as a random walk does."""


class TreeEnsemble(NamedTuple):
    """A TreeEnsembleRegressor that adds, as a node that returns the number of each tree's leaf."""

    node: NodeProto
    starts: Array
    """The first row of each tree in ``table``. This row is 0, for leaves without a value."""
    table: Array
    base: Array

    def sums(self, numbers: Array) -> Sums:
        shape = (len(numbers), len(self.base))
        total, size = np.broadcast_to(self.base, shape).copy(), np.broadcast_to(np.abs(self.base), shape).copy()
        for start, column in zip(self.starts, numbers.T.astype(np.int64), strict=True):
            values = self.table[start + column]
            total += values
            size += np.abs(values)
        return Sums(total, size * (1.0 + 0.5 * np.sqrt(len(self.starts))))


def ensemble_of(node: NodeProto) -> TreeEnsemble | None:
    """The ensemble of ``node``; None if it does something else than add leaves."""
    read = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    adds = read.get("aggregate_function", b"SUM") == b"SUM" and read.get("post_transform", b"NONE") == b"NONE"
    if node.op_type != "TreeEnsembleRegressor" or not adds:
        return None
    trees, nodes, targets = (np.array(read.get(name, ()), np.int64) for name in _LEAVES)
    weights, base = _floats(read, "target_weights"), _floats(read, "base_values")
    leaves, at = np.unique(np.stack([trees, nodes]), axis=1, return_inverse=True)
    ids, first, counts = np.unique(leaves[0], return_index=True, return_counts=True)
    tree = np.repeat(np.arange(len(ids)), counts)
    place = np.arange(leaves.shape[1]) - first[tree] + 1
    starts = first + np.arange(len(ids))
    table = np.zeros((leaves.shape[1] + len(ids), int(read.get("n_targets", 1))))
    np.add.at(table, ((starts[tree] + place)[at.reshape(-1)], targets), weights)
    found = NodeProto()
    found.CopyFrom(node)
    kept = [one for one in node.attribute if one.name.startswith("nodes_")]
    del found.attribute[:]
    found.attribute.extend(kept)
    changed = dict(zip(_LEAVES, (leaves[0], leaves[1], tree), strict=True))
    found.attribute.extend(helper.make_attribute(name, value.tolist()) for name, value in changed.items())
    found.attribute.append(helper.make_attribute("n_targets", len(ids)))
    is_double = "nodes_values_as_tensor" in read
    numbers = place.astype(np.float64 if is_double else np.float32)
    name, value = (
        ("target_weights_as_tensor", numpy_helper.from_array(numbers, "numbers"))
        if is_double
        else ("target_weights", numbers)
    )
    found.attribute.append(helper.make_attribute(name, value))
    return TreeEnsemble(found, starts, table, base if base.size else np.zeros(table.shape[1]))


def _floats(read: dict[str, Any], name: str) -> Array:
    tensor = read.get(f"{name}_as_tensor")
    return np.array(read.get(name, ()) if tensor is None else numpy_helper.to_array(tensor), np.float64)
