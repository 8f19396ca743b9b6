"""Bias correction, compared with plain means, and in graphs with integer kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import networks
import outliers
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.taps import Taps

IMAGES = outliers.images(96)


def means(artifact: Artifact, data: Dataset, tensor: str, axis: int) -> np.ndarray:
    whole = np.concatenate([array for _, array in Taps(artifact, data).run([tensor])]).astype(np.float64)
    return np.moveaxis(whole, axis, -1).reshape(-1, whole.shape[axis]).mean(axis=0)


def kernels(artifact: Artifact, folder: Path) -> list[str]:
    """The operators of a model after ONNX Runtime's rewrites."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(artifact.data, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node]


def product(bias: bool, matmul: bool = False) -> Artifact:
    """One product after a Conv, whose weights are so uneven that rounding shifts the means."""
    n = Network(2)
    x = n.op("Relu", n.op("Conv", "x", n.normal(16, 1, 3, 3), *([n.normal(16)] if bias else [])))
    x = n.op("Flatten", n.op("GlobalAveragePool", x))
    if matmul:
        n.op("Add", n.op("MatMul", x, n.normal(16, 10)), n.normal(10), name="y")
    else:
        n.op("Gemm", x, n.normal(16, 10), *([n.normal(10)] if bias else []), name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 10]})


@pytest.mark.parametrize(("bias", "matmul"), [(True, False), (False, False), (True, True)])
def test_means_become_those_of_the_original(bias: bool, matmul: bool, tmp_path: Path) -> None:
    original = product(bias, matmul)
    integer = outliers.int8(original, IMAGES)
    corrected = correct_biases(original, integer, IMAGES)
    facts = corrected.provenance[-1].facts
    assert facts["left"] == {}
    assert len(facts["corrected"]) == 2
    assert facts["error"][1] < facts["error"][0]
    fit, _ = IMAGES.split_evenly(2)
    want, before, after = (means(artifact, fit, "y", -1) for artifact in (original, integer, corrected))
    assert np.abs(after - want).max() < 0.1 * np.abs(before - want).max()
    assert kernels(corrected, tmp_path) == kernels(integer, tmp_path)


def test_the_integers_of_a_bias_are_the_formula() -> None:
    """b - E[Wq x̂ - W x] in steps of input scale × weight scale, for the first layer, whose x̂ no other layer changes."""
    original = product(bias=True)
    integer = outliers.int8(original, IMAGES)
    corrected = correct_biases(original, integer, IMAGES)
    fit, _ = IMAGES.split_evenly(2)
    shift = means(original, fit, "conv0", 1) - means(integer, fit, "relu1_QuantizeLinear_Input", 1)

    def bias(artifact: Artifact) -> tuple[np.ndarray, np.ndarray]:
        graph = onnx.load_model_from_string(artifact.data).graph
        known = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        written = {name: node for node in graph.node for name in node.output}
        node = next(node for node in graph.node if node.op_type == "Conv")
        source = written[node.input[2]]
        scales = [known[written[name].input[1]] for name in node.input[:2]]
        np.testing.assert_allclose(known[source.input[1]], scales[0] * scales[1], rtol=1e-6)
        return known[source.input[0]], known[source.input[1]]

    (old, scale), (new, _) = bias(integer), bias(corrected)
    assert np.array_equal(new, old + np.round(shift / scale.astype(np.float64)).astype(np.int64))


def test_it_lowers_the_error_of_a_net_that_lost(tmp_path: Path) -> None:
    original = outliers.depthwise(50.0)
    integer = outliers.int8(original, IMAGES)
    corrected = correct_biases(original, integer, IMAGES)
    evaluate = outliers.images(64, seed=3)
    assert outliers.error(corrected, original, evaluate) < 0.8 * outliers.error(integer, original, evaluate)
    assert kernels(corrected, tmp_path) == kernels(integer, tmp_path)


def test_a_scale_too_fine_for_int32_leaves_the_bias() -> None:
    original = product(bias=True)
    proto = onnx.load_model_from_string(outliers.int8(original, IMAGES).data)
    for tensor in proto.graph.initializer:
        if tensor.name == "w1_quantized_scale":
            tensor.CopyFrom(numpy_helper.from_array(np.full(16, 1e-30, np.float32), tensor.name))
    broken = Artifact.from_bytes(proto.SerializeToString())
    assert "INT32" in correct_biases(original, broken, IMAGES).provenance[-1].facts["left"]["Conv_0"]


def test_what_does_not_help_is_not_kept() -> None:
    """Held-out samples differ from the others, so the means of the others are wrong for them."""
    original = product(bias=True)
    integer = outliers.int8(original, IMAGES)
    images = IMAGES.inputs["x"].copy()
    images[::2] *= 30
    mixed = make_dataset({"x": images}, None)
    facts = correct_biases(original, integer, mixed).provenance[-1].facts
    assert facts["error"][1] <= facts["error"][0]
    assert facts["layer_by_layer"]


def test_when_it_is_late_the_remaining_layers_stay_as_they_are() -> None:
    original = outliers.depthwise(50.0)
    integer = outliers.int8(original, IMAGES)
    late = iter([False, *[True] * 100])
    facts = correct_biases(original, integer, IMAGES, lambda: next(late)).provenance[-1].facts
    assert len(facts["corrected"]) <= 1
    assert set(facts["left"].values()) == {"there was no time"}
    facts = correct_biases(original, integer, IMAGES, lambda: True).provenance[-1].facts
    assert facts["corrected"] == []
    assert facts["error"][0] == facts["error"][1]


def test_a_fixed_batch_and_attention_are_fine() -> None:
    artifact = networks.cnn(batch=4)
    data = make_dataset({"x": networks.images(18)[:16]}, None)
    assert correct_biases(artifact, outliers.int8(artifact, data), data).provenance[-1].name == "correct-biases"
    tokens = outliers.tokens(16)
    facts = (
        correct_biases(networks.attention(), outliers.int8(networks.attention(), tokens), tokens).provenance[-1].facts
    )
    assert any("consumer of the MatMul's output must be one Add" in reason for reason in facts["left"].values())


def test_bad_input_is_refused() -> None:
    original = product(bias=True)
    integer = outliers.int8(original, IMAGES)
    with pytest.raises(InvalidData, match="at least 2"):
        correct_biases(original, integer, make_dataset(IMAGES.rows(0, 1), None))
    with pytest.raises(Unsupported, match="quantise"):
        correct_biases(original, original, IMAGES)
    with pytest.raises(Unsupported):
        correct_biases(integer, integer, IMAGES)


def test_the_same_arguments_give_the_same_bytes() -> None:
    original = product(bias=False)
    integer = outliers.int8(original, IMAGES)
    assert correct_biases(original, integer, IMAGES).digest == correct_biases(original, integer, IMAGES).digest
