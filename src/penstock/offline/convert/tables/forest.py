"""Decision trees in ONNX that take the same branch as the source for every input.

A source compares in the precision of its thresholds, ONNX in the precision of the input. LightGBM and scikit-learn have thresholds in
float64; a threshold that is rounded to the nearest float32 sends some float32 inputs the other way. ``rounded`` rounds such that
no float32 input changes its branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from penstock.offline.convert.tree_arrays import ABOVE, AT_MOST, BELOW, IN_SET, LEAF, TreeArrays
from penstock.tensor import Array, DataType

_KINDS = {"<=": AT_MOST, "<": BELOW, ">": ABOVE}
_MODES = {"<=": "BRANCH_LEQ", "<": "BRANCH_LT", ">": "BRANCH_GT"}
_NODES = (
    "treeids",
    "nodeids",
    "featureids",
    "modes",
    "values",
    "truenodeids",
    "falsenodeids",
    "missing_value_tracks_true",
)


class Tree(NamedTuple):
    """A tree as arrays over its nodes. Node 0 is the root."""

    feature: Array
    threshold: Array
    yes: Array
    """The child if the comparison holds; -1 for leaves."""
    no: Array
    missing_yes: Array
    """True where NaN counts as if the comparison held."""
    values: Array
    """[nodes, k] float64, used at leaves; column ``j`` is added to the target ``target + j``."""
    target: int = 0
    sets: Mapping[int, Sequence[int]] = {}
    """Nodes whose comparison is: the value is one of these categories."""


class GraphWriter:
    """Collects the nodes and constants of an ONNX graph. ``prefix`` makes their names unique in a larger graph."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def __call__(self, op: str, *inputs: str | Array, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output. Returns the name of the output."""
        output = f"{self.prefix}{op}_{len(self.nodes)}"
        names = [given if isinstance(given, str) else self._constant(given) for given in inputs]
        self.nodes.append(helper.make_node(op, names, [output], output, domain=domain, **attributes))
        return output

    def rename(self, name: str, to: str) -> None:
        """Give the value ``name`` another name."""
        for node in self.nodes:
            for values in (node.input, node.output):
                values[:] = [to if value == name else value for value in values]

    def _constant(self, value: Array) -> str:
        name = f"{self.prefix}constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


class Forest(NamedTuple):
    """Trees whose leaves are added."""

    trees: Sequence[Tree]
    compare: str
    """``<=``, ``<`` or ``>``."""
    base: Array
    """The value of each target before the first tree."""
    features: int
    categorical: Sequence[int] = ()
    """Features whose values are rounded to whole numbers before they are compared."""
    towards_zero: bool = False
    """Round as C does, and not down."""
    missing: tuple[float, float] | None = None
    """Values in this closed interval count as NaN, in the features ``missing_in``."""
    missing_in: Sequence[int] = ()

    def write(self, writer: GraphWriter, x: str, datatype: DataType) -> str:
        """Add the forest's nodes for the input ``x`` [N, features]. Returns the name of the sums, float32 [N, targets]."""
        if self.missing is not None:
            low, high = np.array(self.missing, datatype.dtype)
            inside = writer("And", writer("GreaterOrEqual", x, low), writer("LessOrEqual", x, high))
            inside = writer("And", inside, np.isin(np.arange(self.features), self.missing_in))
            x = writer("Where", inside, np.array(np.nan, datatype.dtype), x)
        if self.categorical:
            whole = writer("Floor", x)
            if self.towards_zero:
                whole = writer("Cast", writer("Cast", x, to=TensorProto.INT64), to=datatype.onnx)
            x = writer("Where", np.isin(np.arange(self.features), self.categorical), whole, x)
        return writer("TreeEnsembleRegressor", x, domain="ai.onnx.ml", **self._attributes(datatype))

    def write_wide(self, writer: GraphWriter, x: str, datatype: DataType) -> str:
        """Add the forest's nodes as ``write`` does, with sums of float64.

        TreeEnsembleRegressor returns float32. So it returns the number of each tree's leaf, and a table has the values.
        """
        places, table = [], []
        for number, tree in enumerate(self.trees):
            count, columns = tree.values.shape
            values = np.zeros((count, len(self.base)))
            values[:, tree.target : tree.target + columns] = tree.values
            places.append(tree._replace(values=np.arange(count, dtype=np.float64)[:, None], target=number))
            table.append(values)
        starts = np.cumsum([0, *map(len, table)])[:-1]
        leaves = self._replace(trees=places, base=np.zeros(len(places))).write(writer, x, datatype)
        rows = writer("Add", writer("Cast", leaves, to=TensorProto.INT64), starts)
        chosen = writer("Gather", np.concatenate(table), rows)
        return writer("Add", writer("ReduceSum", chosen, np.array([1]), keepdims=0), self.base)

    def check(self) -> None:
        """Raise ValueError if a tree is none, so that a prediction would never end or read other memory."""
        for number, tree in enumerate(self.trees):
            inner = tree.yes >= 0
            children = np.concatenate([tree.yes[inner], tree.no[inner]])
            if children.min(initial=0) < 0 or children.max(initial=0) >= len(inner):
                raise ValueError(f"tree {number} has a node with a missing child")
            if (np.bincount(children, minlength=len(inner)) > (np.arange(len(inner)) > 0)).any():
                raise ValueError(f"tree {number} has a node with several parents")
            if inner.any() and not 0 <= tree.feature[inner].min() <= tree.feature[inner].max() < self.features:
                raise ValueError(f"tree {number} compares a feature that does not exist")

    def arrays(self) -> TreeArrays:
        """The trees without the treatment of inputs in front of them."""
        trees = self.trees
        starts = np.cumsum([0, *(len(tree.yes) for tree in trees)])
        shifts = np.repeat(starts[:-1], np.diff(starts))
        yes, no = np.concatenate([tree.yes for tree in trees]), np.concatenate([tree.no for tree in trees])
        no, yes = np.where(yes < 0, -1, no + shifts), np.where(yes < 0, -1, yes + shifts)
        kind = np.where(yes >= 0, _KINDS[self.compare], LEAF)
        sets = [
            (start + node, float(member))
            for tree, start in zip(trees, starts, strict=False)
            for node, members in tree.sets.items()
            for member in set(members)
        ]
        kind[[int(start) + node for tree, start in zip(trees, starts, strict=False) for node in tree.sets]] = IN_SET
        leaves = [np.nonzero((tree.yes < 0)[:, None] & np.ones(tree.values.shape, np.bool_)) for tree in trees]
        pairs = list(zip(trees, leaves, starts, strict=False))
        return TreeArrays(
            starts[:-1].astype(np.int64),
            kind.astype(np.int64),
            np.concatenate([tree.feature for tree in trees]).astype(np.int64),
            np.concatenate([tree.threshold for tree in trees]).astype(np.float64),
            yes.astype(np.int64),
            no.astype(np.int64),
            np.concatenate([tree.missing_yes for tree in trees]).astype(np.bool_),
            np.array([node for node, _ in sets], np.int64),
            np.array([member for _, member in sets], np.float64),
            np.concatenate([at + start for _, (at, _), start in pairs]).astype(np.int64),
            np.concatenate([tree.target + column for tree, (_, column), _ in pairs]).astype(np.int64),
            np.concatenate([tree.values[at, column] for tree, (at, column), _ in pairs]).astype(np.float64),
            np.asarray(self.base, np.float64),
        )

    def _attributes(self, datatype: DataType) -> dict[str, Any]:
        """The attributes of TreeEnsembleRegressor."""
        columns: list[list[Any]] = [[] for _ in _NODES]
        leaves: list[tuple[Any, ...]] = []
        for number, tree in enumerate(self.trees):
            for column, added in zip(columns, _rows(tree, number, self.compare), strict=True):
                column.extend(added)
            at, target = np.nonzero((tree.yes < 0)[:, None] & np.ones(tree.values.shape, np.bool_))
            leaves.append((np.full(len(at), number), at, tree.target + target, tree.values[at, target]))
        found: dict[str, Any] = {f"nodes_{name}": column for name, column in zip(_NODES, columns, strict=True)}
        trees, nodes, targets, weights = (np.concatenate(parts) for parts in zip(*leaves, strict=True))
        found |= {"target_treeids": trees.tolist(), "target_nodeids": nodes.tolist(), "target_ids": targets.tolist()}
        thresholds = np.array(found.pop("nodes_values"), np.float64)
        if datatype is DataType.FP64:
            for name, values in (("nodes_values", thresholds), ("target_weights", weights), ("base_values", self.base)):
                found[f"{name}_as_tensor"] = numpy_helper.from_array(np.asarray(values, np.float64), name)
        else:
            found |= {"nodes_values": rounded(thresholds, self.compare), "target_weights": weights.astype(np.float32)}
            found["base_values"] = self.base.astype(np.float32)
        return found | {"n_targets": len(self.base)}


def rounded(thresholds: Array, compare: str) -> Array:
    """``thresholds`` in float32, such that ``compare`` holds for the same float32 numbers as before.

    With ``<=`` and ``>``, the largest float32 that is not above the threshold has this property; with ``<``, the smallest that is
    not below it.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = np.asarray(thresholds).astype(np.float32)
        if compare == "<":
            return np.where(near < thresholds, np.nextafter(near, np.float32(np.inf)), near)
        return np.where(near > thresholds, np.nextafter(near, np.float32(-np.inf)), near)


def _rows(tree: Tree, number: int, compare: str) -> tuple[list[Any], ...]:
    """The values of ``_NODES`` for the nodes of ``tree``. A set becomes a chain of comparisons that share their ``yes`` child."""
    inner = tree.yes >= 0
    feature = np.where(inner, tree.feature, 0).tolist()
    modes = np.where(inner, _MODES[compare], "LEAF").tolist()
    values = np.where(inner, tree.threshold, 0.0).tolist()
    yes, no = np.where(inner, tree.yes, 0).tolist(), np.where(inner, tree.no, 0).tolist()
    missing = (inner & tree.missing_yes).astype(int).tolist()
    for node, members in tree.sets.items():
        modes[node], values[node] = "BRANCH_EQ", members[0] if members else np.nan
        last, at = no[node], node
        for member in members[1:]:
            no[at] = at = len(modes)
            added = (feature[node], "BRANCH_EQ", member, yes[node], last, 0)
            for column, value in zip((feature, modes, values, yes, no, missing), added, strict=True):
                column.append(value)
    return [number] * len(modes), list(range(len(modes))), feature, modes, values, yes, no, missing
