"""Compares the trees of a source with those of its ONNX model, node by node.

Rows show how an exporter understands a tree, but reach only a part of a large ensemble. The arrays show all its leaves and thresholds.
Two trees are equal if, from the root on, each pair of nodes

1. compares the same feature with the same numbers on each side. A threshold stands for the largest number of the model's precision
   below the cut, so that ``x < 1``, ``x <= 0.99999994`` and their negations with swapped children are equal in FP32;
2. or has the same set of categories;
3. sends missing values to the same side;
4. or is a leaf with the same values, rounded to the nearest number of the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.offline.convert.certificate import Divergence
from penstock.offline.convert.parity.tree_nodes import NodeTrees
from penstock.offline.convert.tree_arrays import ABOVE, AT_LEAST, BELOW, IN_SET, LEAF, TreeArrays
from penstock.tensor import Array


class Mismatch(NamedTuple):
    """The first difference of two ensembles."""

    where: str
    expected: str
    found: str


class TreeProof(NamedTuple):
    """The result for all ensembles of a source."""

    trees: int = 0
    """Number of trees that equal those of the source."""
    is_complete: bool = False
    """True if there are ensembles, and all are equal."""
    divergence: Divergence | None = None
    tables: frozenset[str] = frozenset()
    """The constants with the values of leaves that are equal."""


def compare_trees(sources: Sequence[TreeArrays], nodes: Iterable[NodeTrees]) -> TreeProof:
    """Find a node for each of ``sources``. Nodes that are left belong to parts of the source without ``TreeArrays``."""
    left, count = list(nodes), 0
    tables: set[str] = set()
    for source in sources:
        differences = [mismatch(source, node) for node in left]
        if None in differences:
            tables.add(left.pop(differences.index(None)).table)
            count += len(source.roots)
            continue
        alike = [len(node.trees.leaf) == len(source.leaf) for node in left]
        at = alike.index(True) if True in alike else 0
        if not left or (found := differences[at]) is None:
            return TreeProof(count)
        return TreeProof(
            count,
            divergence=Divergence(left[at].node, found.where, expected=found.expected, found=found.found),
        )
    return TreeProof(count, bool(sources), None, frozenset(tables))


class _Sides(NamedTuple):
    """The children of each node in the order of their numbers, and the largest number of the lower one."""

    low: Array
    high: Array
    cut: Array
    missing_low: Array


def mismatch(source: TreeArrays, model: NodeTrees) -> Mismatch | None:
    """The first difference of ``model`` from ``source``. None if they are equal."""
    trees = model.trees
    if len(source.roots) != len(trees.roots):
        return Mismatch("the ensemble", f"{len(source.roots)} trees", f"{len(trees.roots)} trees")
    base = source.base.astype(model.adds).astype(np.float64)
    if base.shape != trees.base.shape:
        return Mismatch("the ensemble", f"{len(base)} outputs", f"{len(trees.base)} outputs")
    if (at := _first(base, trees.base)) is not None:
        return Mismatch(f"base value of output {at}", f"{base[at]:.9g}", f"{trees.base[at]:.9g}")
    pairs = _paired(source, trees, model.compares)
    if isinstance(pairs, Mismatch):
        return pairs
    back = np.full(len(trees.kind), -1)
    visited = np.nonzero(pairs >= 0)[0]
    back[pairs[visited]] = visited
    sets = _set_mismatch(source, trees, pairs, back)
    return sets or _leaf_mismatch(source, trees, pairs, back, model.adds)


def _paired(source: TreeArrays, model: TreeArrays, dtype: type[np.floating]) -> Array | Mismatch:
    """The node of ``model`` for each node of ``source``, -1 for those out of reach; or the first pair that differs."""
    ours, theirs = _sides(source, dtype), _sides(model, dtype)
    pairs, taken = np.full(len(source.kind), -1), np.zeros(len(model.kind), np.bool_)
    one, other, visited = source.roots, model.roots, 0
    while len(one):
        visited += len(other)
        pairs[one], taken[other] = other, True
        if visited != taken.sum() or visited > len(source.kind):
            return Mismatch(_where(source, one[0]), "children of their own", "shared children")
        kinds, theirs_kinds = _forms(source.kind[one]), _forms(model.kind[other])
        inner = kinds > 0
        checks: tuple[tuple[str, Array, Array, Array], ...] = (
            ("kind", kinds, theirs_kinds, np.ones(len(one), np.bool_)),
            ("feature", source.feature[one], model.feature[other], inner),
            ("largest number of the lower side", ours.cut[one], theirs.cut[other], kinds == 1),
            ("lower side for missing values", ours.missing_low[one], theirs.missing_low[other], inner),
        )
        for name, mine, yours, matters in checks:
            if (at := _first(mine, yours, matters)) is not None:
                return Mismatch(_where(source, one[at]), f"{name}: {mine[at]}", f"{name}: {yours[at]}")
        one, other = (
            np.concatenate([sides.low[nodes[inner]], sides.high[nodes[inner]]])
            for sides, nodes in ((ours, one), (theirs, other))
        )
    return pairs


def _forms(kinds: Array) -> Array:
    """0 for leaves, 1 for thresholds, 2 for sets."""
    return np.where(kinds == LEAF, 0, np.where(kinds == IN_SET, 2, 1))


def _sides(trees: TreeArrays, dtype: type[np.floating]) -> _Sides:
    swapped = (trees.kind == ABOVE) | (trees.kind == AT_LEAST)
    is_open = (trees.kind == BELOW) | (trees.kind == AT_LEAST)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = trees.threshold.astype(dtype)
        beyond = np.where(is_open, near >= trees.threshold, near > trees.threshold)
        cut = np.where(beyond, np.nextafter(near, dtype(-np.inf)), near).astype(np.float64)
    low, high = np.where(swapped, trees.no, trees.yes), np.where(swapped, trees.yes, trees.no)
    return _Sides(low, high, cut, trees.missing_yes != swapped)


def _set_mismatch(source: TreeArrays, model: TreeArrays, pairs: Array, back: Array) -> Mismatch | None:
    ours = _sorted(source.set_node, source.set_member, keep=pairs[source.set_node] >= 0)
    theirs = _sorted(back[model.set_node], model.set_member, keep=back[model.set_node] >= 0)
    for node in _differing(ours, theirs):
        members = [str(some[1][some[0] == node].astype(np.int64).tolist()) for some in (ours, theirs)]
        return Mismatch(_where(source, node), f"set: {members[0]}", f"set: {members[1]}")
    return None


def _leaf_mismatch(
    source: TreeArrays, model: TreeArrays, pairs: Array, back: Array, dtype: type[np.floating]
) -> Mismatch | None:
    with np.errstate(over="ignore", under="ignore"):
        values = source.value.astype(dtype).astype(np.float64)
    ours = _sorted(source.leaf, source.target, values, keep=(pairs[source.leaf] >= 0) & (values != 0))
    at = back[model.leaf]
    theirs = _sorted(at, model.target, model.value, keep=(at >= 0) & (model.value != 0))
    for node in _differing(ours, theirs):
        told = [
            ", ".join(f"{value:.9g} for output {target:g}" for _, target, value in zip(*some, strict=True))
            for some in ([column[some[0] == node] for column in some] for some in (ours, theirs))
        ]
        return Mismatch(_where(source, node), f"value {told[0] or '0'}", f"value {told[1] or '0'}")
    return None


def _sorted(*columns: Array, keep: Array) -> list[Array]:
    """The kept rows of ``columns``, in the order of the first column, then of the second one."""
    kept = [column[keep] for column in columns]
    order = np.lexsort(kept[::-1])
    return [column[order] for column in kept]


def _differing(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    """The node of the first row that differs; empty if all are equal."""
    count = min(len(ours[0]), len(theirs[0]))
    places = [_first(one[:count], other[:count]) for one, other in zip(ours, theirs, strict=True)]
    found = min((at for at in places if at is not None), default=count)
    rows = [some[0][found] for some in (ours, theirs) if found < len(some[0])]
    return np.array(sorted(rows)[:1], np.int64)


def _first(one: Array, other: Array, matters: Array | bool = True) -> int | None:
    differs = (one != other) & matters
    if one.dtype.kind == "f":
        differs &= ~(np.isnan(one) & np.isnan(other))
    return int(np.argmax(differs)) if differs.any() else None


def _where(source: TreeArrays, node: int) -> str:
    tree = int(np.searchsorted(source.roots, node, side="right")) - 1
    return f"tree {tree}, node {int(node) - int(source.roots[tree])}"
