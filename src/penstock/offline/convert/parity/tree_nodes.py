"""Reads the trees of a TreeEnsembleRegressor as ``TreeArrays``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from onnx import GraphProto, helper, numpy_helper

from penstock.offline.convert.tree_arrays import ABOVE, AT_LEAST, AT_MOST, BELOW, IN_SET, LEAF, TreeArrays
from penstock.tensor import Array

_KINDS = {
    b"LEAF": LEAF,
    b"BRANCH_LEQ": AT_MOST,
    b"BRANCH_LT": BELOW,
    b"BRANCH_GT": ABOVE,
    b"BRANCH_GTE": AT_LEAST,
    b"BRANCH_EQ": IN_SET,
}
_TABLE = (("Cast", None), ("Add", 1), ("Gather", 0), ("ReduceSum", 1), ("Add", 1))
"""Nodes behind an ensemble that returns the places of values in a table of FP64, with the place of the constant among their inputs."""


class NodeTrees(NamedTuple):
    """The trees of a node, and the types in which it compares numbers and has its values."""

    node: str
    trees: TreeArrays
    compares: type[np.floating]
    adds: type[np.floating]
    table: str = ""
    """The constant with the values of the leaves, if the node returns their places."""


def tree_nodes(graph: GraphProto, constants: Mapping[str, Array]) -> Iterator[NodeTrees]:
    """The ensembles of ``graph`` that add leaves and do nothing else."""
    for node in graph.node:
        read = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        adds = read.get("aggregate_function", b"SUM") == b"SUM" and read.get("post_transform", b"NONE") == b"NONE"
        if node.op_type != "TreeEnsembleRegressor" or not adds or (trees := _trees(read)) is None:
            continue
        dtype = np.float64 if "nodes_values_as_tensor" in read else np.float32
        behind = _behind(graph, node.output[0], constants)
        named = behind[1] if len(behind) == len(_TABLE) - 1 else ""
        wide = _from_table(trees, *(constants[one] for one in behind)) if named else None
        name = node.name or node.output[0]
        yield NodeTrees(name, wide or trees, dtype, np.float64 if wide else dtype, named if wide else "")


def _trees(read: Mapping[str, Any]) -> TreeArrays | None:
    """None if the arrays contradict each other."""
    tree, node, feature, yes, no = (
        np.array(read.get(f"nodes_{name}", ()), np.int64)
        for name in ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    )
    modes = read.get("nodes_modes", ())
    threshold, missing = (
        _floats(read, "nodes_values"),
        np.array(read.get("nodes_missing_value_tracks_true", ()), np.bool_),
    )
    missing = missing if missing.size else np.zeros(len(tree), np.bool_)
    if not len(tree) or len({len(tree), *map(len, (node, feature, yes, no, modes, threshold, missing))}) > 1:
        return None
    if not set(modes) <= set(_KINDS):
        return None
    kind = np.array([_KINDS[mode] for mode in modes], np.int64)
    places = _Places(tree, node)
    inner = kind != LEAF
    yes, no = (np.where(inner, places.of(tree, child), -1) for child in (yes, no))
    leaf = places.of(*(np.array(read.get(f"target_{name}", ()), np.int64) for name in ("treeids", "nodeids")))
    target, value = np.array(read.get("target_ids", ()), np.int64), _floats(read, "target_weights")
    if min(yes[inner].min(initial=0), no[inner].min(initial=0), leaf.min(initial=0)) < 0:
        return None
    if len({len(leaf), len(target), len(value)}) > 1:
        return None
    base = _floats(read, "base_values")
    base = base if base.size else np.zeros(int(read.get("n_targets", 1)))
    roots = np.nonzero(np.diff(tree, prepend=tree[0] - 1))[0]
    if len(np.unique(tree)) != len(roots):
        return None
    set_node, set_member, no = _sets(kind, feature, threshold, yes, no, missing)
    return TreeArrays(
        roots, kind, feature, threshold, yes, no, missing, set_node, set_member, leaf, target, value, base
    )


class _Places:
    """Finds nodes by the number of their tree and their own number."""

    def __init__(self, tree: Array, node: Array) -> None:
        self._stride = int(node.max(initial=0)) + 1
        keys = tree * self._stride + node
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def of(self, tree: Array, node: Array) -> Array:
        """The positions; -1 for nodes that do not exist."""
        keys = tree * self._stride + node
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (self._keys[at] == keys) & (node >= 0) & (node < self._stride)
        return np.where(known, self._order[at], -1)


def _sets(
    kind: Array, feature: Array, threshold: Array, yes: Array, no: Array, missing: Array
) -> tuple[Array, Array, Array]:
    """The sets: chains of nodes that compare one feature for equality and share their ``yes`` child.

    Returns the node and the value of each member, and the ``no`` child behind the chain. The first node of a chain gets its
    direction of missing values, which may be that of any of its nodes.
    """
    ends, nodes, members = no.copy(), [], []
    equal = np.nonzero(kind == IN_SET)[0]
    after = no[equal]
    follows = (kind[after] == IN_SET) & (feature[after] == feature[equal]) & (yes[after] == yes[equal])
    following = dict(zip(equal.tolist(), follows.tolist(), strict=True))
    for head in sorted(set(equal.tolist()) - set(after[follows].tolist())):
        at = head
        for _ in range(len(equal)):  # a chain that returns to itself has no end
            nodes.append(head)
            members.append(threshold[at])
            missing[head] |= missing[at]
            if not following[at]:
                break
            at = int(no[at])
        ends[head] = no[at]
    chosen, values = np.array(nodes, np.int64), np.array(members, np.float64)
    real = ~np.isnan(values)
    unique = np.unique(np.stack([chosen[real].astype(np.float64), values[real]]), axis=1)
    return unique[0].astype(np.int64), unique[1], ends


def _behind(graph: GraphProto, name: str, constants: Mapping[str, Array]) -> list[str]:
    """The constants of the nodes of ``_TABLE`` behind the tensor ``name``; fewer if there are other nodes."""
    found: list[str] = []
    for op, place in _TABLE:
        readers = [node for node in graph.node if name in node.input]
        if len(readers) != 1 or readers[0].op_type != op:
            break
        if place is not None:
            if len(readers[0].input) <= place or readers[0].input[place] not in constants:
                break
            found.append(readers[0].input[place])
        name = readers[0].output[0]
    return found


def _from_table(trees: TreeArrays, starts: Array, table: Array, axes: Array, base: Array) -> TreeArrays | None:
    """The trees whose leaves have the rows of ``table``. None if the nodes behind the ensemble do something else."""
    places = trees.value.astype(np.int64)
    if len(starts) != len(trees.base) or axes.tolist() != [1] or trees.base.any() or (places != trees.value).any():
        return None
    tree = np.searchsorted(trees.roots, trees.leaf, side="right") - 1
    rows = starts[trees.target] + places
    if (tree != trees.target).any() or rows.min(initial=0) < 0 or rows.max(initial=0) >= len(table):
        return None
    width = table.shape[1]
    leaf, target = np.repeat(trees.leaf, width), np.tile(np.arange(width), len(rows))
    return msgspec.structs.replace(
        trees,
        leaf=leaf,
        target=target,
        value=table[rows].reshape(-1).astype(np.float64),
        base=np.broadcast_to(base, (width,)).astype(np.float64),
    )


def _floats(read: Mapping[str, Any], name: str) -> Array:
    tensor = read.get(f"{name}_as_tensor")
    return np.array(read.get(name, ()) if tensor is None else numpy_helper.to_array(tensor), np.float64)
