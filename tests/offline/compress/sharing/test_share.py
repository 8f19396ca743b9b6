from __future__ import annotations

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.errors import InvalidConfig, InvalidModel, Unsupported
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.sharing.kmeans import kmeans
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.tensor import Array


def weights(artifact: Artifact) -> dict[str, Array]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def values_besides_zero(array: Array) -> Array:
    return np.unique(array[array != 0])


def test_each_layer_has_its_own_few_values_and_its_zeros() -> None:
    pruned = prune(cnn(), PruneOptions(rule=GlobalRule(sparsity=0.7)))
    shared = share(pruned, ShareOptions(conv_bits=4, fc_bits=3, bias_bits=2))
    before, after = weights(pruned), weights(shared)
    facts = shared.provenance[-1].facts["layers"]
    assert {name: fact["kind"] for name, fact in facts.items()} == {
        "w0": "conv", "w1": "bias", "w2": "conv", "w3": "bias", "w4": "conv", "w5": "bias", "w6": "fc",
    }  # fmt: skip
    for name, fact in facts.items():
        found = values_besides_zero(after[name])
        assert len(found) == fact["centroids"] <= 1 << fact["bits"]
        assert np.array_equal(after[name] == 0, before[name] == 0)
        assert not np.signbit(after[name][after[name] == 0]).any()
        assert (found == found.astype(np.float16)).all()
        norm = np.linalg.norm(before[name].astype(float))
        # Rounding to FP16 comes on top of the clustering.
        assert np.linalg.norm(after[name].astype(float) - before[name]) / norm == pytest.approx(
            fact["relative_error"], abs=1e-6
        )
    assert np.array_equal(before["w7"], after["w7"])  # ten biases are too few
    assert not np.array_equal(values_besides_zero(after["w0"]), values_besides_zero(after["w2"]))


def test_the_values_are_the_optimum() -> None:
    shared = share(mlp(), ShareOptions(fc_bits=4, half_codebooks=False))
    before, after = weights(mlp())["w0"].astype(float), weights(shared)["w0"]
    values = np.unique(before)
    assert after.dtype == np.float32
    assert np.array_equal(np.unique(after), kmeans(values, np.ones(len(values)), 16).centroids.astype(np.float32))


def test_it_is_deterministic_and_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    first = share(mlp(), on_progress=lambda done, total: seen.append((done, total)))
    assert first.digest == share(mlp()).digest
    assert seen == [(n + 1, 5) for n in range(5)]
    assert share(first).data == first.data
    step = first.provenance[-1]
    assert (step.name, step.options) == ("share", msgspec.to_builtins(ShareOptions()))


def test_zero_bits_leave_a_kind_alone_and_names_come_first() -> None:
    shared = weights(share(mlp(), ShareOptions(fc_bits=0, bias_bits=0, bits={"w2": 1})))
    before = weights(mlp())
    assert [name for name in before if not np.array_equal(before[name], shared[name])] == ["w2"]
    assert len(np.unique(shared["w2"])) == 2


def test_values_out_of_the_range_of_fp16_stay_fp32() -> None:
    n = Network()
    n.op("MatMul", "x", n.weight(np.geomspace(1e-12, 1e12, 400).astype(np.float32).reshape(20, 20)), name="y")
    shared = weights(share(n.artifact({"x": ["N", 20]}, {"y": ["N", 20]}), ShareOptions(fc_bits=4)))["w0"]
    assert len(np.unique(shared)) <= 16
    assert np.isfinite(shared).all()
    assert shared.max() > 1e11


def test_integers_stay_integers_around_their_zero_point() -> None:
    n = Network()
    rng = np.random.default_rng(0)
    drawn = {"int8": (rng.normal(0, 30, (64, 8)).clip(-127, 127).astype(np.int8), 0)}
    drawn["uint8"] = (rng.normal(128, 30, (8, 64)).clip(0, 255).astype(np.uint8), 131)
    x = "x"
    for array, zero in drawn.values():
        array[rng.random(array.shape) < 0.4] = zero
        scale, point = n.weight(np.float32(0.01)), n.weight(np.array(zero, array.dtype))
        x = n.op("MatMul", x, n.op("DequantizeLinear", n.weight(array), scale, point))
    n.op("Identity", x, name="y")
    artifact = n.artifact({"x": ["N", 64]}, {"y": ["N", 64]})
    before, after = weights(artifact), weights(share(artifact, ShareOptions(fc_bits=4)))
    for name, (array, zero) in zip(("w2", "w5"), drawn.values(), strict=True):
        assert after[name].dtype == array.dtype
        assert np.array_equal(after[name] == zero, array == zero)
        assert len(np.unique(after[name])) <= 17
        distance = np.abs(after[name].astype(int) - before[name])
        assert 0 < distance.mean() < 5
    assert all(np.array_equal(before[name], after[name]) for name in ("w0", "w1", "w3", "w4"))


def test_sharing_makes_coding_pay() -> None:
    pruned = prune(cnn(), PruneOptions(rule=GlobalRule(sparsity=0.9)))
    shared = share(pruned, ShareOptions(conv_bits=5))
    sizes = [len(coded.encode(artifact.data)) for artifact in (cnn(), pruned, shared)]
    assert sizes[0] > 3 * sizes[1] > 6 * sizes[2]
    assert coded.decode(coded.encode(shared.data)) == shared.data


def test_what_cannot_be_shared() -> None:
    n = Network()
    n.op("Relu", "x", name="y")
    with pytest.raises(Unsupported, match="no Conv, Gemm or MatMul"):
        share(n.artifact({"x": ["N", 2]}, {"y": ["N", 2]}))
    with pytest.raises(InvalidConfig, match=r"no tensors.*called \['nothing'\]"):
        share(mlp(), ShareOptions(bits={"nothing": 3}))
    for options in (ShareOptions(conv_bits=13), ShareOptions(fc_bits=-1), ShareOptions(bits={"w0": 99})):
        with pytest.raises(InvalidConfig, match="bits.* must be at (least 0|most 12)"):
            share(mlp(), options)
    bad = Network()
    bad.op("MatMul", "x", bad.weight(np.full((2, 2), np.nan, np.float32)), name="y")
    with pytest.raises(InvalidModel, match="NaN"):
        share(bad.artifact({"x": ["N", 2]}, {"y": ["N", 2]}))
    with pytest.raises(InvalidModel):
        share(Artifact.from_bytes(b"nothing"))


def test_a_weight_used_twice_is_shared_once() -> None:
    n = Network()
    w = n.normal(16, 16)
    n.op("MatMul", n.op("MatMul", "x", w), w, name="y")
    shared = share(n.artifact({"x": ["N", 16]}, {"y": ["N", 16]}), ShareOptions(fc_bits=2))
    assert list(shared.provenance[-1].facts["layers"]) == ["w0"]
    assert len(np.unique(weights(shared)["w0"])) == 4
