"""Products with their effective weights, and their replacement by other operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import networks
from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.compress.precision.products import ProductModel, node, share_of_products

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def gemm(**attributes: float) -> Artifact:
    n = networks.Network()
    weight = n.weight(np.ascontiguousarray(W.T) if attributes.get("transB") else W)
    n.op("Gemm", "x", weight, n.weight(np.float32([1, 2, 3])), name="y", **attributes)
    shape: list[int | str] = [4, 5] if attributes.get("transA") else ["N", 4]
    return n.artifact({"x": shape}, {"y": ["N", 3]})


@pytest.mark.parametrize("attributes", [{}, {"transB": 1}, {"alpha": 0.5}, {"transB": 1, "alpha": 2.0}, {"beta": 0.5}])
def test_the_weight_is_what_is_multiplied(attributes: dict[str, float]) -> None:
    (found,) = ProductModel(gemm(**attributes), 1).products
    np.testing.assert_allclose(found.weight, W * attributes.get("alpha", 1.0))
    assert (found.input.name, found.node.outputs[0].name, found.bias is None) == ("x", "y", False)


def test_small_products_convolutions_and_infinite_weights_stay() -> None:
    with pytest.raises(Unsupported, match="at least 13 constant"):
        ProductModel(gemm(), 13)
    assert [one.node.op_type for one in ProductModel(networks.cnn(8), 1).products] == ["Gemm"]
    n = networks.Network()
    n.op("MatMul", "x", n.weight(np.full((4, 3), np.inf, np.float32)), name="y")
    with pytest.raises(Unsupported):
        ProductModel(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}), 1)


def test_weights_that_others_read_are_kept_and_others_dropped() -> None:
    n = networks.Network()
    shared, alone = n.weight(W), n.weight(W.T.copy())
    n.op("MatMul", n.op("MatMul", "x", shared), alone, name="hidden")
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["hidden", shared], ["taken"])],
        "branch",
        [],
        [helper.make_tensor_value_info("taken", TensorProto.FLOAT, None)],
    )
    n.op("If", n.weight(np.array(True)), name="y", then_branch=inner, else_branch=inner)
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 3]})

    def initializers(place: int) -> set[str]:
        """With the product at ``place`` replaced by one of another weight."""
        model = ProductModel(artifact, 1)
        product = model.products[place]
        model.replace(product, [node("MatMul", product.input, model.constant(product.weight * 2, "new"))])
        proto = onnx.load_model_from_string(model.write().data)
        onnx.checker.check_model(proto)
        return {tensor.name for tensor in proto.graph.initializer}

    assert {shared, alone} < initializers(0)
    assert shared in initializers(1)
    assert alone not in initializers(1)


def test_a_new_tensor_of_one_name_is_written_once() -> None:
    n = networks.Network()
    square = n.weight(np.eye(4, dtype=np.float32))
    n.op("MatMul", n.op("MatMul", "x", square), square, name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})

    def written() -> bytes:
        model = ProductModel(artifact, 1)
        first, second = model.products
        assert first.weight_name == second.weight_name
        for one in (first, second):
            model.replace(one, [node("MatMul", one.input, model.constant(one.weight, one.weight_name))])
        return model.write("com.microsoft").data

    proto = onnx.load_model_from_string(written())
    onnx.checker.check_model(proto)
    assert len(proto.graph.initializer) == 1
    assert {opset.domain for opset in proto.opset_import} == {"", "com.microsoft"}
    assert written() == written() != artifact.data


def test_the_share_of_the_weights_that_products_hold() -> None:
    assert share_of_products(networks.mlp()) == 1
    assert share_of_products(networks.cnn(8)) < 0.5
    n = networks.Network()
    n.op("Relu", "x", name="y")
    assert share_of_products(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})) == 0
    n = networks.Network()
    x = n.op("Reshape", n.op("Conv", "x", n.normal(2, 3, 1, 1)), n.weight(np.array([-1, 8])))
    n.op("MatMul", x, n.normal(8, 5), name="y")
    assert share_of_products(n.artifact({"x": ["N", 3, 2, 2]}, {"y": ["N", 5]})) == 40 / 46
