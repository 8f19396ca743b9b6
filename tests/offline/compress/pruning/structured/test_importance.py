"""Importance, compared with plain sums and with the real effect of a cut on the outputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, cnn, images
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.importance import by_activation, by_batch_norm, by_norm
from penstock.offline.optimize.graph import constant
from penstock.tensor import Array
from prunable_networks import Images


def _weights(structure: Structure) -> dict[str, Array]:
    return {name: constant(value) for name, value in structure.model.graph.initializers.items()}


def _two_layers() -> tuple[Artifact, Array, Array]:
    n = Network()
    x = n.op("Relu", n.op("MatMul", "x", n.normal(4, 6)), name="hidden")
    n.op("MatMul", x, n.normal(6, 3), name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 3]})
    weights = _weights(Structure(artifact))
    return artifact, weights["w0"].astype(np.float64), weights["w1"].astype(np.float64)


def test_norm_is_the_share_of_squares_in_all_weights_of_a_unit() -> None:
    artifact, first, second = _two_layers()
    (score, _) = by_norm(Structure(artifact)).values()
    made, read = (first**2).sum(axis=0), (second**2).sum(axis=1)
    np.testing.assert_allclose(score, (made / made.sum() + read / read.sum()) / 2, rtol=1e-12)


def test_batch_norm_is_the_share_of_squared_scales() -> None:
    network = Images(0)
    network.conv()
    network.norm()
    network.conv()
    structure = Structure(network.classify("pool"))
    scale = next(slot for slot in structure.slots if slot.node.op_type == "BatchNormalization" and slot.operand == 1)
    gamma = np.square(constant(scale.value).astype(np.float64))
    scores, norms = by_batch_norm(structure), by_norm(structure)
    first, second, *_ = (group.name for group in structure.groups)
    np.testing.assert_allclose(scores[first], gamma / gamma.sum(), rtol=1e-12)
    np.testing.assert_array_equal(scores[second], norms[second])


def test_activation_is_the_energy_that_the_next_layer_loses() -> None:
    artifact, first, second = _two_layers()
    x = np.random.default_rng(1).standard_normal((70, 4)).astype(np.float32)
    (score, _) = by_activation(Structure(artifact), make_dataset({"x": x}, None), batch_size=32).values()
    hidden = np.maximum(x @ first, 0)
    energy = [np.square(np.outer(hidden[:, unit], second[unit])).sum() for unit in range(6)]
    np.testing.assert_allclose(score, energy / np.sum(energy), rtol=1e-5)  # hidden is computed in FP32


def test_a_dead_channel_goes_first_and_changes_nothing() -> None:
    network = Images(0)
    network.conv()
    network.norm()
    proto = onnx.load_model_from_string(network.classify("flatten").data)
    norm = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    for tensor in proto.graph.initializer:
        if tensor.name in norm.input[1:3]:
            array = numpy_helper.to_array(tensor).copy()
            array[2] = 0
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    dead = Structure(Artifact.from_bytes(proto.SerializeToString()))
    name = dead.groups[0].name
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)}, None)
    assert by_activation(dead, data)[name].argmin() == 2
    assert by_batch_norm(dead)[name].argmin() == 2
    cut = dead.cut({name: [n for n in range(dead.groups[0].units) if n != 2]})
    before, after = (get_engine("onnxruntime").load(model, {"threads": 1}) for model in (dead.artifact, cut))
    np.testing.assert_allclose(after.forward(data.rows(0, 2))["y"], before.forward(data.rows(0, 2))["y"], atol=1e-5)


def test_weights_that_are_not_finite_are_refused() -> None:
    n = Network()
    x = n.op("Relu", n.op("MatMul", "x", n.weight(np.full((4, 6), np.nan, np.float32))))
    n.op("MatMul", x, n.normal(6, 3), name="y")
    with pytest.raises(InvalidData, match="not finite"):
        by_norm(Structure(n.artifact({"x": ["N", 4]}, {"y": ["N", 3]})))


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidData):
        by_activation(Structure(cnn()), make_dataset({"x": images(2)[:, :1]}, None))
