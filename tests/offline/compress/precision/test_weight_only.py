"""Weights in blocks of integers: the kernel multiplies the written values, and the reported errors are correct."""

from __future__ import annotations

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import Unsupported
from penstock.offline.compress.precision.dynamic import is_batch_invariant
from penstock.offline.compress.precision.weight_only import (
    WeightOnlyOptions,
    block_integers,
    block_values,
    quantize_weights,
)
from penstock.tensor import Array

OPTIONS = WeightOnlyOptions(least_weights=1)


def product(weight: Array, bias: bool = False) -> Artifact:
    n = networks.Network()
    rows, columns = weight.shape
    names = [n.weight(weight), n.weight(np.arange(columns, dtype=np.float32))] if bias else [n.weight(weight)]
    n.op("Gemm" if bias else "MatMul", "x", *names, name="y")
    return n.artifact({"x": ["N", rows]}, {"y": ["N", columns]})


def run(artifact: Artifact, x: Array) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"x": x})["y"]


def options(**changed: object) -> WeightOnlyOptions:
    return msgspec.structs.replace(OPTIONS, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("rows", [8, 64, 100])
def test_the_engine_multiplies_what_is_written(bits: int, block_size: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((rows, 24)).astype(np.float32)
    x = rng.standard_normal((3, rows)).astype(np.float32)
    chosen = options(bits=bits, block_size=block_size, integer_products=False)
    values = block_values(*block_integers(weight, chosen), rows, bits)
    # Sums of some hundred products in FP32, in another order.
    np.testing.assert_allclose(run(quantize_weights(product(weight), options=chosen), x), x @ values, atol=1e-4)
    # Activations of 8 bits err by about 1/250 of their largest in each of the terms.
    rounded = run(quantize_weights(product(weight), options=options(bits=bits, block_size=block_size)), x)
    assert np.linalg.norm(rounded - x @ values) < 0.02 * np.linalg.norm(x @ values)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 100),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
)
def test_no_weight_is_off_by_more_than_its_step(rows: int, columns: int, bits: int, seed: int, scale: float) -> None:
    weight = (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)
    integers, scales = block_integers(weight, options(bits=bits, block_size=16))
    assert integers.max() < 1 << bits
    values = block_values(integers, scales, rows, bits)
    # The integer that the largest weight would have on the other side is missing, so half a step becomes one there.
    steps = np.repeat(np.abs(scales), 16, axis=1)[:, :rows].T
    assert (np.abs(values - weight) <= steps * 1.001).all()


def test_the_facts_are_measured() -> None:
    artifact = networks.mlp(256)
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((20, 16)).astype(np.float32)}, None)
    chosen = WeightOnlyOptions(bits=4, least_weights=4096, method="nearest")
    quantised = quantize_weights(artifact, data, chosen)
    facts = quantised.provenance[-1].facts
    want, got = (run(model, data.inputs["x"]) for model in (artifact, quantised))
    assert facts["output_error"] == pytest.approx(np.linalg.norm(got - want) / np.linalg.norm(want), rel=1e-3)
    assert facts["products"] == 2
    assert facts["weights"] == 16 * 256 + 256 * 256
    assert 0.05 < facts["weight_error"] < 0.12
    assert facts["size_ratio"] == pytest.approx(quantised.size_bytes / artifact.size_bytes, abs=1e-4)
    assert quantised.size_bytes < 0.2 * artifact.size_bytes
    assert quantised.data == quantize_weights(artifact, data, chosen).data
    assert "output_error" not in quantize_weights(artifact).provenance[-1].facts


def test_data_lower_the_error_on_fresh_samples() -> None:
    artifact, rng = networks.mlp(256), np.random.default_rng(0)
    data = make_dataset({"x": rng.standard_normal((200, 16)).astype(np.float32)}, None)
    x = rng.standard_normal((500, 16)).astype(np.float32)
    want = run(artifact, x)

    def error(**changed: object) -> float:
        made = quantize_weights(artifact, data, options(bits=4, **changed))
        assert made.provenance[-1].name == ("quantize_weights" if changed else "reconstruct")
        return float(np.linalg.norm(run(made, x) - want))

    assert error() < 0.7 * error(method="nearest")


def test_answers_do_not_depend_on_batch_mates() -> None:
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)}, None)
    assert is_batch_invariant(quantize_weights(networks.mlp(), options=OPTIONS), data)


def test_bias_three_axes_and_the_domain() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    quantised = quantize_weights(product(weight, bias=True), options=OPTIONS)
    x = np.zeros((2, 64), np.float32)
    np.testing.assert_allclose(run(quantised, x), np.tile(np.arange(8), (2, 1)))
    assert {o.domain for o in onnx.load_model_from_string(quantised.data).opset_import} == {"", "com.microsoft"}
    attention = quantize_weights(networks.attention(), options=OPTIONS)
    x = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    want, got = (run(model, x) for model in (networks.attention(), attention))
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


def test_too_small_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="at least 65536 constant"):
        quantize_weights(networks.mlp(8))
