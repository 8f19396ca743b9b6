"""Dead neurons removed: answers stay, widths shrink, and what must stay does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.pruning.dead_neurons import remove_dead_neurons
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune, sparsity
from penstock.offline.optimize.verify import Verifier

# Sums of a few dozen FP32 products in another order.
TOLERANCE = 1e-5


def _shapes(artifact: Artifact) -> dict[str, tuple[int, ...]]:
    proto = onnx.load_model_from_string(artifact.data)
    return {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}


def _with(artifact: Artifact, edits: dict[str, object]) -> Artifact:
    """Initialisers set to zero at the given index expressions."""
    proto = onnx.load_model_from_string(artifact.data)
    for tensor in proto.graph.initializer:
        if tensor.name in edits:
            array = numpy_helper.to_array(tensor).copy()
            array[edits[tensor.name]] = 0
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return Artifact.from_bytes(proto.SerializeToString())


def _check(before: Artifact, after: Artifact) -> None:
    verifier = Verifier(before, tolerance=TOLERANCE)
    assert verifier.obstacle == ""
    assert verifier.check(after.data).failure == ""
    onnx.checker.check_model(onnx.load_model_from_string(after.data), full_check=True)


def conv_net(pads: int, activation: str = "Sigmoid") -> Artifact:
    """conv (w0, w1), activation, conv (w2, w3), ReLU, pooling, Gemm (w4, w5)."""
    n = Network()
    x = n.op(activation, n.conv("x", 1, 6))
    w = n.normal(8, 6, 3, 3, fan_in=30)
    x = n.op("Relu", n.op("Conv", x, w, n.normal(8), pads=[pads] * 4))
    x = n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    n.gemm(n.op("Flatten", x), 8 * (3 + pads) ** 2, 4, name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 4]})


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "Tanh", "Elu"])
def test_a_neuron_that_nothing_reaches_becomes_part_of_the_next_bias(activation: str) -> None:
    n = Network()
    n.gemm(n.op(activation, n.gemm("x", 16, 12)), 12, 4, name="y")
    before = _with(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), {"w0": np.s_[:, [2, 5, 7]]})
    after = remove_dead_neurons(before)
    assert _shapes(after) == {"w0": (16, 9), "w1": (9,), "w2": (9, 4), "w3": (4,)}
    _check(before, after)
    facts = after.provenance[-1].facts
    assert facts["layers"] == {"w0": {"channels": 12, "removed": 3}}
    assert 0 <= facts["max_relative_error"] < TOLERANCE


def test_a_next_layer_without_bias_is_given_one() -> None:
    n = Network()
    n.op("Gemm", n.op("Sigmoid", n.gemm("x", 16, 12)), n.normal(4, 12), name="y", transB=1)
    before = _with(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), {"w0": np.s_[:, 3]})
    after = remove_dead_neurons(before)
    assert sorted(_shapes(after).values()) == sorted([(16, 11), (11,), (4, 11), (4,)])
    _check(before, after)


def test_a_neuron_that_nobody_reads_goes_and_takes_others_with_it() -> None:
    before = _with(mlp(), {"w4": np.s_[[1, 2]], "w2": np.s_[7, :]})
    # Unit 7 feeds nothing; units 5 and 6 of the first layer feed only units 1 and 2 of the second, which nobody reads.
    before = _with(before, {"w2": (np.array([[5], [6]]), np.setdiff1d(np.arange(64), [1, 2]))})
    after = remove_dead_neurons(before)
    assert _shapes(after)["w0"] == (16, 61)
    assert _shapes(after)["w2"] == (61, 62)
    _check(before, after)


def test_a_constant_channel_stays_before_a_padded_convolution() -> None:
    dead = {"w0": np.s_[2], "w1": np.s_[:0]}
    padded, unpadded = _with(conv_net(pads=1), dead), _with(conv_net(pads=0), dead)
    assert _shapes(remove_dead_neurons(padded))["w0"] == (6, 1, 3, 3)
    assert _shapes(remove_dead_neurons(unpadded))["w0"] == (5, 1, 3, 3)
    _check(unpadded, remove_dead_neurons(unpadded))


def test_a_zero_channel_goes_also_before_a_padded_convolution_and_through_flatten() -> None:
    before = _with(
        conv_net(pads=1, activation="Tanh"), {"w0": np.s_[2], "w1": np.s_[2], "w2": np.s_[[0, 3]], "w3": np.s_[0]}
    )
    after = remove_dead_neurons(before)
    assert _shapes(after)["w0"] == (5, 1, 3, 3)
    assert _shapes(after)["w2"] == (6, 5, 3, 3)
    assert _shapes(after)["w4"] == (6 * 16, 4)
    _check(before, after)


def test_one_channel_stays_when_all_are_dead() -> None:
    before = _with(mlp(), {"w0": np.s_[:], "w2": np.s_[:]})
    after = remove_dead_neurons(before)
    assert _shapes(after)["w0"][1] == _shapes(after)["w2"][1] == 1
    _check(before, after)
    assert remove_dead_neurons(after).data == after.data


def test_a_model_without_dead_neurons_comes_back_as_it_was() -> None:
    artifact = mlp()
    after = remove_dead_neurons(artifact)
    assert after.data == artifact.data
    assert after.provenance[-1].facts["removed"] == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 0.99))
def test_answers_stay_whatever_was_pruned(seed: int, share: float) -> None:
    n = Network(seed)
    x = n.op("LeakyRelu", n.gemm("x", 10, 12))
    x = n.op("Clip", n.gemm(x, 12, 9), n.weight(np.float32(-0.5)), n.weight(np.float32(0.5)))
    n.gemm(x, 9, 3, name="y")
    before = prune(n.artifact({"x": ["N", 10]}, {"y": ["N", 3]}), PruneOptions(GlobalRule(share, 1.0)))
    after = remove_dead_neurons(before)
    _check(before, after)
    assert sparsity(after)["nonzero"] <= sparsity(before)["nonzero"] if share < 0.9 else True
    assert remove_dead_neurons(after).data == after.data, "nothing dead is left"


def test_after_heavy_pruning_the_file_shrinks() -> None:
    n = Network()
    x = n.op("Relu", n.gemm("x", 64, 512))
    x = n.op("Relu", n.gemm(x, 512, 512))
    n.gemm(x, 512, 10, name="y")
    pruned = prune(n.artifact({"x": ["N", 64]}, {"y": ["N", 10]}), PruneOptions(GlobalRule(0.95, 0.999)))
    after = remove_dead_neurons(pruned)
    assert after.size_bytes < 0.6 * pruned.size_bytes
    _check(pruned, after)
    rows = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    old, new = (get_engine("onnxruntime").load(a, {"threads": 1}).forward({"x": rows})["y"] for a in (pruned, after))
    assert np.abs(new - old).max() <= TOLERANCE * np.abs(old).max()
