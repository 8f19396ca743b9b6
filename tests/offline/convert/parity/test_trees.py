"""Comparison of trees: every change of a tree is found, and other forms of the same tree are none."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import onnx
import pytest

from penstock.offline.convert.parity.tree_nodes import NodeTrees, tree_nodes
from penstock.offline.convert.parity.trees import compare_trees, mismatch
from penstock.offline.convert.tables.forest import Forest, GraphWriter, Tree
from penstock.tensor import Array, DataType

COMPARISONS = ("<=", "<", ">")


def tree(depth: int, seed: int, target: int = 0, width: int = 1, *, sets: bool = False) -> Tree:
    rng, inner = np.random.default_rng(seed), 2**depth - 1
    at = np.arange(2 * inner + 1)
    is_inner = at < inner
    return Tree(
        np.where(is_inner, rng.integers(0, 3, len(at)), -1),
        np.where(is_inner, rng.normal(size=len(at)), 0.0),
        np.where(is_inner, 2 * at + 1, -1),
        np.where(is_inner, 2 * at + 2, -1),
        is_inner & (rng.random(len(at)) < 0.5),
        rng.normal(size=(len(at), width)),
        target,
        {0: (3, 1, 7), 2: (), 4: (5,)} if sets else {},
    )


def forest(compare: str = "<=", *, sets: bool = False) -> Forest:
    return Forest([tree(3, 1, sets=sets), tree(4, 2, 1), tree(0, 3, 0, 2)], compare, np.array([0.1, -3.0]), 3)


def graph_of(source: Forest, *, wide: bool = False, datatype: DataType = DataType.FP32) -> onnx.GraphProto:
    writer = GraphWriter()
    (source.write_wide if wide else source.write)(writer, "x", datatype)
    return onnx.helper.make_graph(writer.nodes, "model", [], [], writer.constants)


def found(graph: onnx.GraphProto) -> list[NodeTrees]:
    return list(tree_nodes(graph, {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}))


def attribute(graph: onnx.GraphProto, name: str) -> onnx.AttributeProto:
    (node,) = [node for node in graph.node if node.op_type == "TreeEnsembleRegressor"]
    return next(one for one in node.attribute if one.name == name)


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize(("wide", "datatype"), [(False, DataType.FP32), (False, DataType.FP64), (True, DataType.FP32)])
def test_written_trees_equal_their_source(compare: str, sets: bool, wide: bool, datatype: DataType) -> None:
    source = forest(compare, sets=sets)
    assert source.arrays().is_valid
    (node,) = found(graph_of(source, wide=wide, datatype=datatype))
    assert mismatch(source.arrays(), node) is None
    assert node.adds is (np.float64 if wide or datatype is DataType.FP64 else np.float32)
    assert bool(node.table) is wide


@pytest.mark.parametrize("compare", COMPARISONS)
def test_every_changed_number_is_found(compare: str) -> None:
    source = forest(compare)
    graph = graph_of(source)
    modes = list(attribute(graph, "nodes_modes").strings)
    inner = [at for at, mode in enumerate(modes) if mode != b"LEAF"]
    changes: list[tuple[str, int]] = [
        *(("nodes_values", at) for at in inner),
        *(("nodes_featureids", at) for at in inner),
        *(("nodes_missing_value_tracks_true", at) for at in inner),
        *(("nodes_truenodeids", at) for at in inner),
        *(("target_weights", at) for at in range(len(attribute(graph, "target_weights").floats))),
        *(("target_ids", at) for at in range(len(attribute(graph, "target_ids").ints))),
        *(("base_values", at) for at in range(2)),
    ]
    for name, at in changes:
        changed = onnx.GraphProto.FromString(graph.SerializeToString())
        one = attribute(changed, name)
        if one.floats:
            one.floats[at] = np.nextafter(np.float32(one.floats[at]), np.float32(np.inf))
        elif name == "nodes_truenodeids":
            one.ints[at] = attribute(changed, "nodes_falsenodeids").ints[at]
        else:
            one.ints[at] = 1 - one.ints[at] if one.ints[at] < 2 else 0
        proof = compare_trees([source.arrays()], found(changed))
        assert proof.divergence is not None, (name, at)
        assert not proof.is_complete


def test_a_changed_mode_is_found() -> None:
    graph = graph_of(forest("<="))
    for at, mode in enumerate(attribute(graph, "nodes_modes").strings):
        if mode == b"BRANCH_LEQ":
            for other in (b"BRANCH_LT", b"BRANCH_GT", b"BRANCH_EQ"):
                changed = onnx.GraphProto.FromString(graph.SerializeToString())
                attribute(changed, "nodes_modes").strings[at] = other
                assert compare_trees([forest("<=").arrays()], found(changed)).divergence


def test_the_difference_names_the_tree_and_the_node() -> None:
    graph = graph_of(forest())
    attribute(graph, "nodes_values").floats[15 + 2] = 9.0
    (difference,) = [mismatch(forest().arrays(), node) for node in found(graph)]
    assert difference is not None
    assert difference.where == "tree 1, node 2"
    assert difference.found == "largest number of the lower side: 9.0"


def test_the_difference_of_a_leaf_tells_both_values() -> None:
    graph = graph_of(forest())
    weights = attribute(graph, "target_weights").floats
    first = weights[0]
    weights[0] = 0.5
    (difference,) = [mismatch(forest().arrays(), node) for node in found(graph)]
    assert difference == ("tree 0, node 7", f"value {first:.9g} for output 0", "value 0.5 for output 0")


@pytest.mark.parametrize("change", [lambda members: members[:-1], lambda members: (*members, 9)])
def test_another_set_is_found(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    source = forest(sets=True)
    first = source.trees[0]
    sets = {node: change(tuple(members)) for node, members in first.sets.items()}
    other = source._replace(trees=[first._replace(sets=sets), *source.trees[1:]])
    proof = compare_trees([source.arrays()], found(graph_of(other)))
    assert proof.divergence is not None
    assert proof.divergence.source == "tree 0, node 0"
    assert proof.divergence.expected == "set: [1, 3, 7]"


def test_other_forms_of_a_tree_are_equal() -> None:
    """``x < 1`` with its children swapped is ``x >= 1``, and is ``x <= 0.99999994`` in FP32."""
    leaves = np.array([[0.0], [1.0], [2.0]])
    below = Tree(np.array([0, -1, -1]), np.array([1.0, 0, 0]), *children(1, 2), np.array([True, False, False]), leaves)
    at_most = below._replace(threshold=np.array([float(np.nextafter(np.float32(1), np.float32(0))), 0, 0]))
    swapped = Tree(np.array([0, -1, -1]), at_most.threshold, *children(2, 1), np.zeros(3, np.bool_), leaves)
    source = Forest([below], "<", np.zeros(1), 1)
    for other, compare in ((at_most, "<="), (swapped, ">")):
        assert not compare_trees(
            [source.arrays()], found(graph_of(Forest([other], compare, np.zeros(1), 1)))
        ).divergence
    wrong = Forest([at_most], "<=", np.zeros(1), 1)
    assert compare_trees([source.arrays()], found(graph_of(wrong, datatype=DataType.FP64))).divergence


def children(yes: int, no: int) -> tuple[Array, Array]:
    return np.array([yes, -1, -1]), np.array([no, -1, -1])


def test_each_ensemble_of_several_is_found() -> None:
    one, other = forest("<="), forest("<=")._replace(trees=[tree(2, 9)])
    graph = graph_of(one)
    graph.node.extend(graph_of(other).node)
    proof = compare_trees([other.arrays(), one.arrays()], found(graph))
    assert proof == (4, True, None, frozenset({""}))
    assert compare_trees([one.arrays(), one.arrays()], found(graph)).divergence


def test_a_missing_tree_is_found() -> None:
    source = forest()
    proof = compare_trees([source.arrays()], found(graph_of(source._replace(trees=source.trees[:2]))))
    assert proof.divergence is not None
    assert proof.divergence.expected == "3 trees"


@pytest.mark.parametrize(("name", "value"), [("aggregate_function", "MAX"), ("post_transform", "LOGISTIC")])
def test_an_ensemble_that_does_something_else_proves_nothing(name: str, value: str) -> None:
    graph = graph_of(forest())
    graph.node[0].attribute.append(onnx.helper.make_attribute(name, value))
    assert found(graph) == []
    assert compare_trees([forest().arrays()], []) == (0, False, None, frozenset())


def test_a_model_that_visits_a_node_twice_differs() -> None:
    graph = graph_of(forest())
    attribute(graph, "nodes_truenodeids").ints[3] = 0
    assert compare_trees([forest().arrays()], found(graph)).divergence


@pytest.mark.parametrize("name", ["roots", "yes", "leaf", "target", "value", "kind", "missing_yes", "set_node"])
def test_contradictory_arrays_are_invalid(name: str) -> None:
    arrays = forest(sets=True).arrays()
    value = getattr(arrays, name)
    assert not msgspec.structs.replace(arrays, **{name: value[:-1] if name != "roots" else value + 10_000}).is_valid
    assert not msgspec.structs.replace(arrays, **{name: value.astype(np.float32)}).is_valid
