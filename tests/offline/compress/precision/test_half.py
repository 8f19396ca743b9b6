"""Weights stored in 16 bits: the same arithmetic, half the bytes, and no silent loss."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
from penstock.artifact import Artifact
from penstock.engines.registry import available_engines, get_engine
from penstock.errors import Unsupported
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.tensor import Array

X = networks.images(4)


def run(artifact: Artifact, x: Array, engine: str = "onnxruntime", level: dict[str, str] | None = None) -> Array:
    return get_engine(engine).load(artifact, {"threads": 1, **(level or {})}).forward({"x": x})["y"]


def rounded(artifact: Artifact, dtype: type) -> Artifact:
    """The weights of at least 256 elements rounded and back, in FP32."""
    proto = onnx.load_model_from_string(artifact.data)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size >= 256:
            tensor.CopyFrom(numpy_helper.from_array(array.astype(dtype).astype(np.float32), tensor.name))
    return Artifact.from_bytes(proto.SerializeToString())


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize(("kind", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_it_computes_with_the_rounded_weights(kind: str, dtype: type, engine: str) -> None:
    artifact = networks.cnn()
    halved = halve_weights(artifact, HalfOptions(kind=kind))  # type: ignore[arg-type]
    onnx.checker.check_model(onnx.load_model_from_string(halved.data))
    # The same numbers in FP32; OpenVINO may order its sums otherwise.
    np.testing.assert_allclose(run(halved, X, engine), run(rounded(artifact, dtype), X, engine), rtol=1e-4, atol=1e-4)


def test_it_runs_without_graph_rewrites() -> None:
    halved = halve_weights(networks.cnn())
    np.testing.assert_allclose(run(halved, X, level={"graph_level": "disabled"}), run(halved, X), atol=1e-4)


def test_size_signature_and_facts() -> None:
    artifact = networks.cnn(128)
    halved = halve_weights(artifact)
    step = halved.provenance[-1]
    assert halved.size_bytes < 0.51 * artifact.size_bytes
    assert step.facts["size_ratio"] == pytest.approx(halved.size_bytes / artifact.size_bytes, abs=1e-4)
    assert step.facts["kept"] == []
    assert 0 < step.facts["weight_error"] < 2**-11
    engine = get_engine("onnxruntime")
    assert engine.load(halved, {}).signature == engine.load(artifact, {}).signature
    assert halved.data == halve_weights(artifact).data


@pytest.mark.parametrize("value", [65520.0, 1e30, np.inf, np.nan])
def test_what_fp16_cannot_hold_stays_fp32(value: float) -> None:
    n = networks.Network()
    large = np.ones((16, 16), np.float32)
    large[3, 3] = value
    n.op("MatMul", n.op("MatMul", "x", n.normal(16, 16)), n.weight(large), name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    halved = halve_weights(artifact)
    assert halved.provenance[-1].facts["kept"] == ["w1"]
    kept = {t.name: t for t in onnx.load_model_from_string(halved.data).graph.initializer}["w1"]
    np.testing.assert_array_equal(numpy_helper.to_array(kept), large)
    if np.isfinite(value):
        assert halve_weights(artifact, HalfOptions(kind="bf16")).provenance[-1].facts["kept"] == []


def test_scalars_stay_fp32_so_that_engines_know_the_parameters_of_operators() -> None:
    n = networks.Network()
    x = n.op("Dropout", "x", n.weight(np.float32(0)), n.weight(np.array(True)))
    n.op("MatMul", n.weight(np.ones((3, 3), np.float32)), x, name="y")
    artifact = n.artifact({"x": ["N", 3, 4]}, {"y": ["N", 3, 4]})
    x_value = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    halved = halve_weights(artifact, HalfOptions("bf16", least_weights=1))
    np.testing.assert_allclose(run(halved, x_value), run(artifact, x_value), rtol=1e-5)


def test_what_fp16_would_flush_to_zero_stays_fp32() -> None:
    n = networks.Network()
    n.op("MatMul", "x", n.weight(np.full((16, 16), 1e-8, np.float32)), name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    with pytest.raises(Unsupported, match="too small for the type: w0"):
        halve_weights(artifact)
    assert halve_weights(artifact, HalfOptions(kind="bf16")).size_bytes < artifact.size_bytes


def test_nothing_to_store_and_old_opsets() -> None:
    with pytest.raises(Unsupported, match="no large FP32 weights"):
        halve_weights(networks.mlp(4))
    with pytest.raises(Unsupported, match="opset 11.*BF16"):
        halve_weights(networks.mlp(64, opset=11), HalfOptions(kind="bf16"))
    assert halve_weights(networks.mlp(64, opset=11)).size_bytes
    scale = onnx.helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", scale=[2.0], offset=[0.0])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 1]) for name in "xy")
    sets = [onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    proto = onnx.helper.make_model(onnx.helper.make_graph([scale], "g", [x], [y]), opset_imports=sets, ir_version=8)
    with pytest.raises(Unsupported, match="no weight of the model can be stored as BF16"):
        halve_weights(Artifact.from_bytes(proto.SerializeToString()), HalfOptions(kind="bf16"))


def test_weights_that_callers_may_override_stay() -> None:
    n = networks.Network()
    n.op("MatMul", n.op("MatMul", "x", n.normal(16, 16)), n.normal(16, 16), name="y")
    proto = onnx.load_model_from_string(n.artifact({"x": ["N", 16]}, {"y": ["N", 16]}).data)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w0", onnx.TensorProto.FLOAT, [16, 16]))
    halved = halve_weights(Artifact.from_bytes(proto.SerializeToString()))
    assert halved.provenance[-1].facts["weights"] == 1
