"""Dynamic INT8: accurate, smaller, and correct about the dependence on the batch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import Unsupported
from penstock.offline.compress.precision.dynamic import (
    DynamicOptions,
    batch_dependence,
    is_batch_invariant,
    quantize_dynamic,
)
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

X = np.random.default_rng(0).standard_normal((12, 16)).astype(np.float32)
DATA = make_dataset({"x": X * np.linspace(0.2, 2, 12, dtype=np.float32)[:, None]}, None)
ALL = DynamicOptions(least_weights=1)


def run(artifact: Artifact, x: Array) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"x": x})["y"]


def by_hand(x: Array, weight: Array, levels: int) -> Array:
    """DynamicQuantizeLinear by its definition, then the product of the integers."""
    low, high = min(x.min(), 0), max(x.max(), 0)
    scale = np.float32((high - low) / 255)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    integers = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    steps = np.abs(weight).max(axis=0) / levels
    return (integers @ np.clip(np.rint(weight / steps), -levels, levels)) * (scale * steps)


@pytest.mark.parametrize(("reduce_range", "levels"), [(False, 127), (True, 63)])
def test_it_is_the_product_of_rounded_matrices(reduce_range: bool, levels: int) -> None:
    n = networks.Network()
    weight = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    n.op("MatMul", "x", n.weight(weight), name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 8]})
    quantised = quantize_dynamic(artifact, DATA, DynamicOptions(least_weights=1, reduce_range=reduce_range))
    # Sums of integers are exact on every CPU; what is left is the rounding of FP32.
    np.testing.assert_allclose(run(quantised, X), by_hand(X, weight, levels), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(quantised, X), X @ weight, atol=0.2)


@pytest.mark.parametrize(
    ("artifact", "shape"), [(networks.mlp(), (6, 16)), (networks.attention(), (6, 5, 32))], ids=["mlp", "attention"]
)
def test_answers_stay_close(artifact: Artifact, shape: tuple[int, ...]) -> None:
    data = make_dataset({"x": np.random.default_rng(3).standard_normal(shape).astype(np.float32)}, None)
    quantised = quantize_dynamic(artifact, data, DynamicOptions(least_weights=1, reduce_range=True))
    want, got = (run(model, data.inputs["x"]) for model in (artifact, quantised))
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.06
    onnx.checker.check_model(onnx.load_model_from_string(quantised.data))


def test_one_rounding_for_all_that_read_a_tensor() -> None:
    data = make_dataset({"x": np.random.default_rng(3).standard_normal((4, 5, 32)).astype(np.float32)}, None)
    graph = onnx.load_model_from_string(quantize_dynamic(networks.attention(), data, ALL).data).graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("MatMulInteger") == 4
    assert operators.count("DynamicQuantizeLinear") == 2  # of x, for queries, keys and values, and of what is mixed


def test_dependence_on_batch_mates_is_measured_and_told() -> None:
    facts = quantize_dynamic(networks.mlp(), DATA, ALL).provenance[-1].facts
    assert facts["batch_dependence"] > 1e-3
    assert facts["batch_invariant"] is False
    assert facts["products"] == 3
    assert is_batch_invariant(networks.mlp(), DATA)


def test_static_int8_does_not_depend_on_batch_mates() -> None:
    scheme = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
    static = quantize(networks.mlp(), ranges(collect(networks.mlp(), DATA.inputs), RangeMethod.MSE, scheme), scheme)
    assert is_batch_invariant(static, DATA)


def test_a_model_without_free_batches_has_no_mates() -> None:
    assert batch_dependence(networks.cnn(8, batch=2), make_dataset({"x": networks.images(4)}, None)) == 0


def test_outputs_without_an_axis_for_samples_do_not_count() -> None:
    n = networks.Network()
    product = n.op("MatMul", "x", n.normal(16, 8, fan_in=16))
    n.op("Relu", product, name="y")
    n.op("Cast", n.op("Transpose", n.op("NonZero", n.op("Relu", product))), to=1, name="places")
    n.op("Reshape", product, n.weight(np.array([-1])), name="flat")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 8], "places": ["M", 2], "flat": ["P"]})
    facts = quantize_dynamic(artifact, DATA, ALL).provenance[-1].facts
    assert facts["products"] == 1
    assert facts["batch_dependence"] > 0


def test_size_and_provenance() -> None:
    artifact = networks.mlp(256)
    quantised = quantize_dynamic(artifact, DATA)
    step = quantised.provenance[-1]
    assert step.name == "quantize_dynamic"
    assert step.source_digest == artifact.digest
    assert step.facts["products"] == 2  # 16 × 256 and 256 × 256; 256 × 4 is too small
    assert quantised.size_bytes < 0.3 * artifact.size_bytes
    assert quantised.data == quantize_dynamic(artifact, DATA).data


def test_weights_have_7_bits_unless_all_8_are_asked_for() -> None:
    def largest(options: DynamicOptions) -> int:
        graph = onnx.load_model_from_string(quantize_dynamic(networks.mlp(), DATA, options).data).graph
        arrays = [numpy_helper.to_array(tensor) for tensor in graph.initializer]
        return max(int(np.abs(array).max()) for array in arrays if array.dtype == np.int8)

    assert largest(ALL) == 63
    assert largest(DynamicOptions(least_weights=1, reduce_range=False)) == 127


def test_convolutions_are_never_dynamic() -> None:
    data = make_dataset({"x": networks.images(4)}, None)
    with pytest.raises(Unsupported, match="smaller products and convolutions, use calibrated INT8"):
        quantize_dynamic(networks.cnn(32), data)
    graph = onnx.load_model_from_string(quantize_dynamic(networks.cnn(32), data, ALL).data).graph
    assert sum(node.op_type == "Conv" for node in graph.node) == 3


@pytest.mark.parametrize("tiny", [0.0, 1e-45])
def test_a_channel_of_zeros_or_of_less_than_a_step(tiny: float) -> None:
    n = networks.Network()
    weight = np.zeros((16, 2), np.float32)
    weight[0] = tiny
    n.op("MatMul", "x", n.weight(weight), name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 2]})
    assert not run(quantize_dynamic(artifact, DATA, ALL), X).any()
