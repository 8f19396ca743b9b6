"""Graphs run node by node, as written or in double precision."""

import numpy as np
import onnx
import pytest

from penstock.errors import PenstockError
from penstock.offline.convert.parity.nodes import NodeError, Nodes

X = np.array([1.0, 2.0], np.float32)


@pytest.fixture
def nodes():
    return Nodes(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y, float[N] z)
            <float w = {0.1}> { a = Mul(x, w) y = Neg(a) r = RandomNormalLike(x) z = Add(a, r) }"""
        )
    )


def test_only_needed_nodes_run(nodes):
    assert nodes.needed(["y"], ["x"]) == [0, 1]
    assert nodes.needed(["y"], ["a"]) == [1]
    assert nodes.needed(["x"], ["x"]) == []
    seen = []
    nodes.run({"a": X}, ["y"], seen=seen.extend)
    assert seen == ["y"]


def test_results_have_the_precision_of_the_run(nodes):
    want = np.float32(X) * np.float32(0.1)
    assert nodes.run({"x": X}, ["a"])["a"].tolist() == want.tolist()
    found = nodes.run({"x": X}, ["a"], precise=True)["a"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, X.astype(np.float64) * np.float64(np.float32(0.1)), rtol=1e-15)


def test_random_nodes_and_what_depends_on_them(nodes):
    assert nodes.random() == [2]
    assert nodes.dependent(nodes.random()) == {"r", "z"}


def test_a_tensor_that_nothing_computes_is_named(nodes):
    with pytest.raises(PenstockError, match="'x' is not given"):
        nodes.run({}, ["y"])
    with pytest.raises(PenstockError, match="no node computes the tensor 'other'"):
        nodes.run({"x": X}, ["other"])


def test_a_node_that_fails_is_named():
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x, float[M] v) => (float[K] y) { y = Add(x, v) }'
    )
    with pytest.raises(NodeError, match="node 'y .Add.' fails") as caught:
        Nodes(model).run({"x": X, "v": np.ones(3, np.float32)}, ["y"])
    assert caught.value.node == "y (Add)"


def test_the_steps_of_quantised_tensors():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (uint8[N] y)
        <float s = {0.5}, uint8 p = {0}> { y = QuantizeLinear(x, s, p) }"""
    )
    assert Nodes(model).steps == {"x": 0.5}
