from __future__ import annotations

import numpy as np
import onnx
import pytest

from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import InvalidModel
from penstock.offline.compress.pruning.prepare import prepare
from penstock.offline.optimize.model import to_artifact
from prunable_networks import encoder


def answer(data: bytes, x: np.ndarray) -> np.ndarray:
    return get_engine("onnxruntime").load(Artifact.from_bytes(data), {"threads": 1}).forward({"x": x})["y"]


def operators(artifact: Artifact) -> list[str]:
    return [node.op_type for node in prepare(artifact).graph]


def test_computed_constants_and_identities_of_weights_become_initialisers() -> None:
    n = Network()
    weight = n.op("Transpose", n.op("Identity", n.normal(3, 4)))
    hidden = n.op("MatMul", "x", weight)
    n.op("MatMul", n.op("Relu", hidden), n.op("Identity", n.normal(3, 2)), name="y")
    assert operators(n.artifact({"x": ["N", 4]}, {"y": ["N", 2]})) == ["MatMul", "Relu", "MatMul"]


def test_three_nodes_that_swap_two_axes_become_one_transpose() -> None:
    n = Network()
    flat = n.op("Reshape", "x", n.weight(np.array([-1, 4, 6])))
    swapped = n.op("Transpose", flat, perm=[0, 2, 1])
    n.op("Reshape", swapped, n.weight(np.array([2, 3, 6, 4])), name="y")
    artifact = n.artifact({"x": [2, 3, 4, 6]}, {"y": [2, 3, 6, 4]})
    assert operators(artifact) == ["Transpose"]
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(answer(to_artifact(prepare(artifact)).data, x), answer(artifact.data, x))


def test_other_reshapes_around_a_transpose_stay() -> None:
    n = Network()
    swapped = n.op("Transpose", n.op("Reshape", "x", n.weight(np.array([-1, 6, 4]))), perm=[0, 2, 1])
    n.op("Reshape", swapped, n.weight(np.array([2, 3, 6, 4])), name="y")
    assert operators(n.artifact({"x": [2, 3, 4, 6]}, {"y": [2, 3, 6, 4]})) == ["Reshape", "Transpose", "Reshape"]


@pytest.mark.parametrize("artifact", [encoder(), mlp()], ids=["encoder", "mlp"])
def test_the_answers_stay_and_shapes_are_known(artifact: Artifact) -> None:
    model = prepare(artifact)
    assert all(value.shape is not None for node in model.graph for value in node.outputs)
    spec = onnx.load_model_from_string(artifact.data).graph.input[0].type.tensor_type.shape
    x = np.random.default_rng(0).standard_normal([dim.dim_value or 2 for dim in spec.dim]).astype(np.float32)
    np.testing.assert_allclose(answer(to_artifact(model).data, x), answer(artifact.data, x), rtol=1e-4, atol=1e-5)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModel):
        prepare(Artifact.from_bytes(b"no model"))
