"""Runs of a graph node by node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from penstock.errors import PenstockError
from penstock.offline.convert.parity.nodes import NodeError, Nodes
from tests.compared import parsed

X = np.array([[1.0, 2.0, 3.0]], np.float32)
CHAIN = parsed("g (float[N,3] x) => (float[N,3] y) { a = Exp(x) b = Log(a) y = Neg(b) }")


def test_a_run_as_written_has_the_types_of_the_file() -> None:
    found = Nodes(CHAIN).run({"x": X}, ["a", "y"])
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(found["y"], -X, rtol=1e-6)


def test_a_precise_run_is_in_double_precision() -> None:
    found = Nodes(CHAIN).run({"x": X}, ["y"], precise=True)
    np.testing.assert_allclose(found["y"], -X.astype(np.float64), rtol=1e-15)


def test_a_run_starts_at_the_given_tensors() -> None:
    nodes = Nodes(CHAIN)
    assert nodes.needed(["y"], ["a"]) == [1, 2]
    np.testing.assert_array_equal(nodes.run({"b": X}, ["y"])["y"], -X)


def test_missing_tensors_are_named() -> None:
    with pytest.raises(PenstockError, match="'x' is not given"):
        Nodes(CHAIN).run({}, ["y"])
    with pytest.raises(PenstockError, match="no node computes the tensor 'z'"):
        Nodes(CHAIN).run({"x": X}, ["z"])


def test_the_node_that_fails_is_named() -> None:
    model = parsed("g (float[N,3] x, int64[K] s) => (float[M] y) { a = Exp(x) y = Reshape(a, s) }")
    model.graph.node[1].name = "reshaped"
    with pytest.raises(NodeError) as caught:
        Nodes(model).run({"x": X, "s": np.array([7])}, ["y"])
    assert caught.value.node == "reshaped (Reshape)"


def test_operators_without_a_kernel_for_double_are_precise_or_marked() -> None:
    """ONNX Runtime has no convolution in double precision."""
    model = parsed("g (float[N,1,4] x) => (float[N,1,2] y) <float[1,1,3] w = {0.1, 0.2, 0.3}> { y = Conv(x, w) }")
    nodes = Nodes(model)
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    found = nodes.run({"x": x}, ["y"], precise=True)["y"]
    assert found.dtype == np.float64
    weights = np.array([0.1, 0.2, 0.3], np.float32).astype(np.float64)
    wanted = np.array([x[0, 0, at : at + 3].astype(np.float64) @ weights for at in range(2)])
    np.testing.assert_allclose(found[0, 0], wanted, rtol=1e-6 if "y" in nodes.rounded else 1e-14)


def test_trees_are_added_in_double_precision() -> None:
    tree = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_falsenodeids=[0],
        nodes_featureids=[0],
        nodes_modes=["LEAF"],
        nodes_nodeids=[0],
        nodes_treeids=[0],
        nodes_truenodeids=[0],
        nodes_values=[0.0],
        target_ids=[0],
        target_nodeids=[0],
        target_treeids=[0],
        target_weights=[0.1],
    )
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 1]) for name in "xy"]
    graph = helper.make_graph([tree], "g", info[:1], info[1:])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10
    )
    nodes = Nodes(model)
    found = nodes.run({"x": np.ones((1, 1), np.float32)}, ["y"], precise=True)["y"]
    assert found.dtype == np.float64
    assert found[0, 0] == np.float32(0.1)
    assert nodes.sum_errors["y"][0, 0] == pytest.approx(0.15)


def test_random_nodes_and_what_depends_on_them() -> None:
    model = parsed(
        "g (float[N,3] x) => (float[N,3] y, float[N,3] z) { r = RandomNormalLike(x) y = Add(x, r) z = Abs(x) }"
    )
    nodes = Nodes(model)
    assert nodes.random() == [0]
    assert nodes.dependent([0]) == {"r", "y"}


def test_seen_gets_every_value() -> None:
    names: list[str] = []
    Nodes(CHAIN).run({"x": X}, ["y"], precise=True, seen=names.extend)
    assert names == ["a", "b", "y"]


def test_a_branch_is_run() -> None:
    model = parsed(
        "g (float[N,3] x, bool c) => (float[N,3] y) { y = If(c) <"
        "then_branch = t () => (float[N,3] u) { u = Exp(x) }, else_branch = e () => (float[N,3] v) { v = Neg(x) }> }"
    )
    found = Nodes(model).run({"x": X, "c": np.array(False)}, ["y"], precise=True)
    np.testing.assert_array_equal(found["y"], -X)
