"""Quantisation end to end, on the engines that will run the result."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
from fine_integers import LARGEST_ERROR, quantize_finely
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import available_engines, get_engine
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import Range, TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

SATURATING = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
UNSIGNED = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
SIGNED = IntegerScheme(DataType.INT8, DataType.INT8, True, "test")

NETWORKS = {
    "cnn": (networks.cnn(), networks.images(32)),
    "mlp": (networks.mlp(), np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)),
    "attention": (networks.attention(), np.random.default_rng(0).standard_normal((32, 5, 32)).astype(np.float32)),
}


def run(artifact: Artifact, x: Array, engine: str = "onnxruntime") -> Array:
    return get_engine(engine).load(artifact, {"threads": 1}).forward({"x": x})["y"]


@functools.cache
def statistics(network: str) -> dict[str, TensorStatistics]:
    artifact, x = NETWORKS[network]
    return collect(artifact, {"x": x})


def int8(
    network: str,
    scheme: IntegerScheme = SATURATING,
    placement: QdqPlacement = QdqPlacement.LINEAR,
    method: RangeMethod = RangeMethod.MSE,
) -> Artifact:
    return quantize(NETWORKS[network][0], ranges(statistics(network), method, scheme), scheme, placement)


def relative_error(actual: Array, expected: Array) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def initializers(artifact: Artifact) -> dict[str, Array]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("placement", list(QdqPlacement))
@pytest.mark.parametrize("scheme", [SATURATING, SIGNED], ids=["u8", "s8"])
@pytest.mark.parametrize("network", list(NETWORKS))
def test_answers_stay_close(network: str, scheme: IntegerScheme, placement: QdqPlacement, engine: str) -> None:
    artifact, x = NETWORKS[network]
    error = relative_error(run(int8(network, scheme, placement), x, engine), run(artifact, x))
    assert 0 < error < 0.06


@pytest.mark.parametrize("placement", list(QdqPlacement))
@pytest.mark.parametrize("network", list(NETWORKS))
def test_only_rounding_changes_the_answers(network: str, placement: QdqPlacement) -> None:
    artifact, x = NETWORKS[network]
    fine = quantize_finely(artifact, make_dataset({"x": x}, None), placement)
    assert 0 < relative_error(run(fine, x), run(artifact, x)) < LARGEST_ERROR / 10


@pytest.mark.parametrize("layer", range(3))
def test_a_lost_bias_shows_in_fine_integers(layer: int) -> None:
    artifact, x = NETWORKS["cnn"]
    model = onnx.load_model_from_string(
        quantize_finely(artifact, make_dataset({"x": x}, None), QdqPlacement.LINEAR).data
    )
    node = [node for node in model.graph.node if node.op_type == "Conv"][layer]
    del node.input[2:]
    made = Artifact.from_bytes(model.SerializeToString())
    assert relative_error(run(made, x), run(artifact, x)) > LARGEST_ERROR


@pytest.mark.parametrize("method", list(RangeMethod))
def test_every_method_serves(method: RangeMethod) -> None:
    artifact, x = NETWORKS["cnn"]
    assert relative_error(run(int8("cnn", method=method), x), run(artifact, x)) < 0.06


@pytest.mark.parametrize("placement", list(QdqPlacement))
def test_signature_and_batch_stay_as_they_were(placement: QdqPlacement) -> None:
    artifact, x = NETWORKS["cnn"]
    engine = get_engine("onnxruntime")
    original, quantised = engine.load(artifact, {}), engine.load(int8("cnn", placement=placement), {})
    assert quantised.signature == original.signature
    whole = quantised.forward({"x": x})["y"]
    assert whole.dtype == np.float32
    np.testing.assert_allclose(quantised.forward({"x": x[:1]})["y"], whole[:1], atol=1e-5)


def test_size_is_about_a_quarter() -> None:
    artifact = networks.cnn(channels=256)
    data = {"x": networks.images(2)}
    quantised = quantize(artifact, ranges(collect(artifact, data), RangeMethod.MIN_MAX, UNSIGNED), UNSIGNED)
    assert quantised.size_bytes < 0.27 * artifact.size_bytes


def test_same_arguments_give_the_same_bytes() -> None:
    assert int8("cnn").data == int8("cnn").data


def test_provenance() -> None:
    artifact, _ = NETWORKS["cnn"]
    step = int8("cnn").provenance[-1]
    assert step.name == "quantize"
    assert step.source_digest == artifact.digest
    assert step.options["activation"] == "UINT8"
    assert step.options["placement"] == "linear"
    assert step.facts["linear_operators"] == 4


def test_weights_of_seven_bits_where_eight_would_saturate() -> None:
    def largest(scheme: IntegerScheme) -> int:
        weights = [
            array for array in initializers(int8("cnn", scheme)).values() if array.dtype == np.int8 and array.ndim == 4
        ]
        assert len(weights) == 3
        return max(int(np.abs(array.astype(int)).max()) for array in weights)

    assert largest(SATURATING) == 64
    assert largest(UNSIGNED) == 127


def test_zero_is_an_integer_and_ranges_are_ours() -> None:
    artifact, _ = NETWORKS["mlp"]
    wanted = {"x": Range(-1.0, 3.0), "hidden": Range(0.0, 2.0), "y": Range(-1.0, 1.0)}
    found = initializers(quantize(artifact, {**dict.fromkeys(statistics("mlp"), Range(0.0, 1.0)), **wanted}, UNSIGNED))
    assert found["x_scale"] == pytest.approx(4 / 255)
    assert found["x_zero_point"] == 64
    assert found["hidden_scale"] == pytest.approx(2 / 255)
    assert found["hidden_zero_point"] == 0


def test_range_after_relu_holds_before_it() -> None:
    # The convolution's own result reaches far below zero; quantised with its own range, half of the integers would be lost.
    artifact, known = NETWORKS["cnn"][0], statistics("cnn")
    graph = onnx.load_model_from_string(
        quantize(artifact, ranges(known, RangeMethod.MIN_MAX, UNSIGNED), UNSIGNED).data
    ).graph
    assert sum(node.op_type == "Relu" for node in graph.node) == 1  # the one after the addition, which stays float
    quantizers = {node.input[1] for node in graph.node if node.op_type == "QuantizeLinear"}
    scales = {
        tensor.name: float(numpy_helper.to_array(tensor)) for tensor in graph.initializer if tensor.name in quantizers
    }
    assert scales["stem_scale"] == pytest.approx(known["stem"].histogram.max / 255)


def test_attention_scores_keep_their_order_under_a_mask() -> None:
    artifact, x = NETWORKS["attention"]
    quantised = int8("attention", placement=QdqPlacement.WIDE, method=RangeMethod.ENTROPY)
    changed = x.copy()
    changed[:, 1:] = 7  # must not be seen by the first position
    np.testing.assert_allclose(run(quantised, x)[:, 0], run(quantised, changed)[:, 0], atol=1e-5)
    assert relative_error(run(quantised, x), run(artifact, x)) < 0.06


def test_operators_without_ranges_stay_float() -> None:
    artifact, x = NETWORKS["mlp"]
    found = ranges(collect(artifact, {"x": x}), RangeMethod.MIN_MAX, UNSIGNED)
    partly = quantize(artifact, {"x": found["x"]}, UNSIGNED)
    assert partly.provenance[-1].facts["linear_operators"] == 1
    assert relative_error(run(partly, x), run(artifact, x)) < 0.02


def test_nothing_to_quantise_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no operator to quantise"):
        quantize(NETWORKS["mlp"][0], {}, UNSIGNED)


def test_old_opset_and_overridable_weights() -> None:
    artifact, (_, x) = networks.mlp(opset=11), NETWORKS["mlp"]
    quantised = quantize(artifact, ranges(collect(artifact, {"x": x}), RangeMethod.MSE, UNSIGNED), UNSIGNED)
    assert relative_error(run(quantised, x), run(artifact, x)) < 0.06


def test_it_is_silent_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    handlers = list(logging.getLogger().handlers)
    int8("attention", placement=QdqPlacement.WIDE)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert logging.getLogger().handlers == handlers


def test_nodes_kept_float_read_and_write_what_the_float_model_does() -> None:
    artifact, x = NETWORKS["cnn"]
    known = ranges(statistics("cnn"), RangeMethod.MSE, SATURATING)
    some = quantize(artifact, known, SATURATING, keep_float=["Conv_0"])
    graph = onnx.load_model_from_string(some.data).graph
    producers = {name: node for node in graph.node for name in node.output}
    stem = next(node for node in graph.node if node.op_type == "Relu")
    conv = producers[stem.input[0]]
    assert stem.output[0] == "stem"
    assert {node.op_type for node in graph.node if "stem" in node.input} == {"QuantizeLinear", "Add"}
    assert conv.input[0] == "x"
    assert conv.input[1] in {tensor.name for tensor in graph.initializer}
    assert some.provenance[-1].options["keep_float"] == ["Conv_0"]
    assert some.provenance[-1].facts["integer_operators"] == int8("cnn").provenance[-1].facts["integer_operators"] - 2
    assert relative_error(run(some, x), run(artifact, x)) < relative_error(run(int8("cnn"), x), run(artifact, x))


def test_a_name_of_no_node_and_a_model_all_float_are_errors() -> None:
    artifact, _ = NETWORKS["mlp"]
    known = ranges(statistics("mlp"), RangeMethod.MSE, SATURATING)
    with pytest.raises(InvalidArgument, match="Gemm_7"):
        quantize(artifact, known, SATURATING, keep_float=["Gemm_7"])
    with pytest.raises(Unsupported, match="no operator to quantise"):
        quantize(artifact, known, SATURATING, keep_float=["Gemm_0", "Gemm_2", "Gemm_4"])
