from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import networks
from penstock.artifact import Artifact, Format
from penstock.offline.optimize.structure import structure


def with_weights(model: Artifact, change) -> Artifact:
    """``model`` with ``change(array)`` instead of each of its initialisers."""
    proto = onnx.load_model_from_string(model.data)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    return Artifact.from_bytes(proto.SerializeToString())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 16))
def test_values_of_weights_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = with_weights(networks.cnn(8), lambda array: rng.uniform(0.5, 2.0, array.shape).astype(array.dtype))
    assert other.digest != networks.cnn(8).digest
    assert structure(other) == structure(networks.cnn(8))


@pytest.mark.parametrize(
    "other",
    [
        networks.cnn(9),
        networks.mlp(),
        with_weights(networks.cnn(8), np.zeros_like),
        with_weights(networks.cnn(8), lambda array: array.astype(np.float64)),
    ],
    ids=["shapes", "operators", "zeros", "types"],
)
def test_what_can_change_the_speed_matters(other: Artifact) -> None:
    assert structure(other) != structure(networks.cnn(8))


def test_attributes_and_indices_matter() -> None:
    def gathered(index: int, axis: int) -> Artifact:
        n = networks.Network()
        n.op("Gather", "x", n.weight(np.array([index], np.int64)), name="y", axis=axis)
        return n.artifact({"x": [4, 4]}, {"y": ["a", "b"]})

    assert len({structure(gathered(index, axis)) for index in (0, 1) for axis in (0, 1)}) == 4


def test_the_values_of_a_quantised_bias_do_not_matter() -> None:
    def dequantised(value: int) -> Artifact:
        n = networks.Network()
        bias = n.op("DequantizeLinear", n.weight(np.full(4, value, np.int32)), n.weight(np.float32(0.1 * value)))
        n.op("Add", "x", bias, name="y")
        return n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})

    assert structure(dequantised(3)) == structure(dequantised(5))
    assert structure(dequantised(3)) != structure(dequantised(0))


def test_models_that_cannot_be_read_are_alike_only_if_they_are_equal() -> None:
    one, other = (Artifact.from_bytes(data) for data in (b"not a model", b"nor this"))
    assert structure(one) == structure(Artifact.from_bytes(b"not a model")) != structure(other)


def test_other_formats_are_alike_only_if_they_are_equal() -> None:
    one, other = (Artifact.from_bytes(data, Format.TFLITE) for data in (b"a", b"b"))
    assert structure(one) == structure(Artifact.from_bytes(b"a", Format.TFLITE)) != structure(other)
