from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, cnn
from penstock.artifact import Artifact
from penstock.errors import InvalidConfig, InvalidModel, Unsupported
from penstock.offline.compress.pruning.magnitude import prunable_weights
from penstock.offline.compress.sharing.layers import find_layers
from penstock.offline.optimize.model import load_model


def kinds(artifact: Artifact, *named: str) -> dict[str, str]:
    return {name: layer.kind for name, layer in find_layers(load_model(artifact), frozenset(named)).items()}


def network() -> Network:
    """w0 [4, 16]: Gemm; w1 [16]: its bias; w2 [16, 3]: MatMul; w3 [1, 3]: added; w4: a shape."""
    n = Network()
    hidden = n.gemm("x", 4, 16)
    wide = n.op("MatMul", hidden, n.normal(16, 3))
    n.op("Reshape", n.op("Add", wide, n.normal(1, 3)), n.weight(np.array([-1, 3])), name="y")
    return n


def test_weights_and_long_biases_are_found_by_the_nodes_that_read_them() -> None:
    artifact = network().artifact({"x": ["N", 4]}, {"y": ["N", 3]})
    assert kinds(artifact) == {"w0": "fc", "w1": "bias", "w2": "fc"}
    assert kinds(artifact, "w3") == {"w0": "fc", "w1": "bias", "w2": "fc", "w3": "other"}
    with pytest.raises(InvalidConfig, match=r"called \['gone', 'w4'\]"):
        kinds(artifact, "gone", "w4")


def test_convolutions_come_first_where_several_nodes_read_a_tensor() -> None:
    assert set(kinds(cnn()).values()) == {"conv", "fc", "bias"}
    n = Network()
    shared = n.normal(4, 4, 1, 1)
    image = n.op("Conv", "x", shared)
    flat = n.op("Reshape", shared, n.weight(np.array([4, 4])))
    n.op("MatMul", n.op("Flatten", image), flat, name="y")
    assert kinds(n.artifact({"x": [1, 4, 1, 1]}, {"y": [1, 4]}))[shared] == "conv"


def test_integers_behind_dequantize_linear_have_their_zero_point() -> None:
    n = Network()
    integers = n.weight(np.arange(12, dtype=np.uint8).reshape(4, 3))
    weight = n.op("DequantizeLinear", integers, n.weight(np.float32(0.1)), n.weight(np.array(7, np.uint8)))
    n.op("MatMul", "x", weight, name="y")
    (layer,) = find_layers(load_model(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}))).values()
    assert (layer.kind, layer.zero, layer.array.dtype) == ("fc", 7, np.uint8)


def test_a_function_with_the_name_of_an_operator_has_no_weights() -> None:
    model = onnx.load_model_from_string(network().artifact({"x": ["N", 4]}, {"y": ["N", 3]}).data)
    model.graph.node[1].domain = "mine"
    body = [onnx.helper.make_node("MatMul", ["a", "b"], ["c"])]
    opset = onnx.helper.make_opsetid("", 17)
    model.functions.append(onnx.helper.make_function("mine", "MatMul", ["a", "b"], ["c"], body, [opset]))
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    artifact = Artifact.from_bytes(model.SerializeToString())
    assert kinds(artifact) == {"w0": "fc", "w1": "bias"}
    assert set(prunable_weights(load_model(artifact))) == {"w0"}


def test_a_model_without_weights_and_one_that_is_not_finite_are_refused() -> None:
    n = Network()
    n.op("Relu", "x", name="y")
    with pytest.raises(Unsupported, match="nothing to share"):
        kinds(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))
    model = onnx.load_model_from_string(network().artifact({"x": ["N", 4]}, {"y": ["N", 3]}).data)
    broken = numpy_helper.to_array(model.graph.initializer[0]).copy()
    broken[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(broken, "w0"))
    with pytest.raises(InvalidModel, match="'w0' contains NaN or infinity"):
        kinds(Artifact.from_bytes(model.SerializeToString()))
