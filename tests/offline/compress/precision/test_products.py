"""Products found as they are multiplied, and other operators put in their place."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import networks
from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.compress.precision.products import Replacement, products, replaced
from penstock.offline.compress.ptq.placement import FloatModel

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def gemm(**attributes: float) -> FloatModel:
    n = networks.Network()
    weight = n.weight(np.ascontiguousarray(W.T) if attributes.get("transB") else W)
    n.op("Gemm", "x", weight, n.weight(np.float32([1, 2, 3])), name="y", **attributes)
    shape: list[int | str] = [4, 5] if attributes.get("transA") else ["N", 4]
    return FloatModel(n.artifact({"x": shape}, {"y": ["N", 3]}))


@pytest.mark.parametrize("attributes", [{}, {"transB": 1}, {"alpha": 0.5}, {"transB": 1, "alpha": 2.0}])
def test_the_weight_is_what_is_multiplied(attributes: dict[str, float]) -> None:
    (found,) = products(gemm(**attributes), 1)
    np.testing.assert_allclose(found.weight, W * attributes.get("alpha", 1.0))
    assert (found.input, found.output, bool(found.bias)) == ("x", "y", True)


@pytest.mark.parametrize("attributes", [{"transA": 1}, {"beta": 0.5}])
def test_other_forms_stay(attributes: dict[str, float]) -> None:
    with pytest.raises(Unsupported, match="no MatMul or Gemm"):
        products(gemm(**attributes), 1)


def test_small_products_convolutions_and_infinite_weights_stay() -> None:
    with pytest.raises(Unsupported, match="at least 13 constant"):
        products(gemm(), 13)
    assert [one.node.op_type for one in products(FloatModel(networks.cnn(8)), 1)] == ["Gemm"]
    n = networks.Network()
    n.op("MatMul", "x", n.weight(np.full((4, 3), np.inf, np.float32)), name="y")
    with pytest.raises(Unsupported):
        products(FloatModel(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]})), 1)


def test_weights_that_others_read_are_kept_and_others_dropped() -> None:
    n = networks.Network()
    shared, alone = n.weight(W), n.weight(W.T.copy())
    hidden = n.op("MatMul", n.op("MatMul", "x", shared), alone, name="hidden")
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["hidden", shared], ["taken"])],
        "branch",
        [],
        [helper.make_tensor_value_info("taken", TensorProto.FLOAT, None)],
    )
    n.op("If", n.weight(np.array(True)), name="y", then_branch=inner, else_branch=inner)
    model = FloatModel(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}))
    swapped = {
        one.node.name: Replacement(
            [helper.make_node("MatMul", [one.input, "new"], [one.output])],
            [numpy_helper.from_array(one.weight * 2, "new" if one.output != hidden else "other")],
        )
        for one in products(model, 1)[:1]
    }
    graph = onnx.load_model_from_string(replaced(model, swapped)).graph
    assert sorted(tensor.name for tensor in graph.initializer) == sorted(["new", shared, alone, n.weights[-1].name])
    swapped = {one.node.name: Replacement([onnx.NodeProto()], []) for one in products(model, 1)[1:2]}
    assert alone not in {t.name for t in onnx.load_model_from_string(replaced(model, swapped)).graph.initializer}


def test_a_new_tensor_of_one_name_is_written_once() -> None:
    n = networks.Network()
    square = n.weight(np.eye(4, dtype=np.float32))
    n.op("MatMul", n.op("MatMul", "x", square), square, name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})
    model = FloatModel(artifact)
    found = products(model, 1)
    assert found[0].weight_name == found[1].weight_name
    swapped = {
        one.node.name: Replacement(
            [helper.make_node("MatMul", [one.input, "new"], [one.output])], [numpy_helper.from_array(one.weight, "new")]
        )
        for one in found
    }
    data = replaced(model, swapped, ["com.microsoft"])
    proto = onnx.load_model_from_string(data)
    onnx.checker.check_model(proto)
    assert [tensor.name for tensor in proto.graph.initializer] == ["new"]
    assert [opset.domain for opset in proto.opset_import] == ["", "com.microsoft"]
    assert data == replaced(model, swapped, ["com.microsoft"])
    assert Artifact.from_bytes(data).digest != artifact.digest
