"""Activation-aware scaling, compared with its formula, and its purpose: INT4 weights that meet channels of uneven activations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.activation_aware import activation_aware
from penstock.offline.compress.precision.weight_only import (
    WeightOnlyOptions,
    block_integers,
    block_values,
    improved,
    quantize_weights,
)
from penstock.offline.compress.reconstruct.reconstruction import errors_on
from penstock.offline.sessions import loaded
from penstock.tensor import Array

PLAIN = WeightOnlyOptions(4, 32, "nearest", equalize=False, integer_products=False, least_weights=1)
AWQ = WeightOnlyOptions(4, 32, "nearest", integer_products=False, least_weights=1)
GPTQ = WeightOnlyOptions(4, 32, equalize=False, integer_products=False, least_weights=1)
BOTH = WeightOnlyOptions(4, 32, integer_products=False, least_weights=1)


def normalised(outlier: float = 20.0, seed: int = 0, width: int = 96) -> Artifact:
    """LayerNormalization with outlier channels, and a Gemm."""
    n, rng = Network(seed), np.random.default_rng(seed)
    gamma = np.ones(width, np.float32)
    gamma[rng.choice(width, 4, replace=False)] = outlier
    x = n.op("LayerNormalization", "x", n.weight(gamma), n.weight(np.zeros(width, np.float32)))
    n.gemm(x, width, 48, name="y")
    return n.artifact({"x": ["N", width]}, {"y": ["N", 48]})


def layers() -> Artifact:
    """Three Gemms with Relu, whose hidden channels have uneven ranges."""
    n, rng = Network(0), np.random.default_rng(0)
    first = (rng.normal(0, 0.25, (32, 128)) * rng.lognormal(0, 1, 128)).astype(np.float32)
    x = n.op("Relu", n.op("Gemm", "x", n.weight(first), n.normal(128, fan_in=25)))
    n.gemm(n.op("Relu", n.gemm(x, 128, 128)), 128, 16, name="y")
    return n.artifact({"x": ["N", 32]}, {"y": ["N", 16]})


def transformer(width: int = 64) -> Artifact:
    """A block: attention with two residual sums, LayerNormalizations of uneven channels, and products with biases."""
    n, rng = Network(0), np.random.default_rng(0)

    def normal(x: str) -> str:
        gamma = rng.lognormal(0, 1, width).astype(np.float32)
        return n.op("LayerNormalization", x, n.weight(gamma), n.weight(0.1 * gamma), axis=-1)

    def linear(x: str, inputs: int, outputs: int) -> str:
        return n.op("Add", n.op("MatMul", x, n.normal(inputs, outputs, fan_in=inputs)), n.normal(outputs, fan_in=99))

    h = normal("x")
    q, k, v = (linear(h, width, width) for _ in "qkv")
    scores = n.op("Mul", n.op("MatMul", q, n.op("Transpose", k, perm=[0, 2, 1])), n.weight(np.float32(width**-0.5 / 4)))
    x = n.op("Add", "x", linear(n.op("MatMul", n.op("Softmax", scores, axis=-1), v), width, width))
    h = linear(normal(x), width, 4 * width)
    n.op("Add", x, linear(n.op("Mul", h, n.op("Sigmoid", h)), 4 * width, width), name="y")
    return n.artifact({"x": ["N", 8, width]}, {"y": ["N", 8, width]})


NETWORKS: dict[str, tuple[Callable[[], Artifact], tuple[int, ...]]] = {
    "LayerNormalization and Gemm": (normalised, (96,)),
    "three Gemms": (layers, (32,)),
    "transformer block": (transformer, (8, 64)),
}


def rows(size: tuple[int, ...], count: int = 128, seed: int = 1) -> Dataset:
    """Correlated samples whose channels have uneven ranges. All seeds have the same distribution."""
    mix, rng = np.random.default_rng(9), np.random.default_rng(seed)
    mixed = mix.normal(size=(size[-1], size[-1])) * np.exp(mix.normal(0, 0.7, size[-1])) / size[-1] ** 0.5
    return make_dataset({"x": (rng.standard_normal((count, *size)) @ mixed).astype(np.float32)}, None)


def run(model: Artifact, data: Dataset) -> Array:
    with loaded(model, as_written=True) as running:
        return running.forward(data.inputs)["y"].astype(np.float64)


def error(made: Artifact, original: Artifact, data: Dataset) -> float:
    want = run(original, data)
    return float(np.linalg.norm(run(made, data) - want) / np.linalg.norm(want))


def in_blocks(weight: Array) -> Array:
    return block_values(*block_integers(weight.astype(np.float32), PLAIN), len(weight), 4)


def weights(artifact: Artifact) -> dict[str, Array]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in graph.initializer}


def test_the_scales_are_the_papers_formula() -> None:
    model, data = normalised(), rows((96,))
    scaled = activation_aware(model, data, in_blocks)
    old, new = weights(model), weights(scaled)
    (link,) = scaled.provenance[-1].facts["links"].values()
    x = data.inputs["x"].astype(np.float64)
    read = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * old["w0"] + old["w1"]
    s = np.abs(read).mean(axis=0) ** link["alpha"]
    s /= np.sqrt(s.max() * s.min())
    np.testing.assert_allclose(new["w2"], old["w2"] * s[:, None], rtol=1e-4)
    np.testing.assert_allclose(new["w0"], old["w0"] / s, rtol=1e-4)
    assert link["error"][1] < link["error"][0]


@settings(max_examples=12, deadline=None)
@given(outlier=st.floats(8, 100), seed=st.integers(0, 50))
def test_outlier_channels_cost_less_on_held_out_data(outlier: float, seed: int) -> None:
    model, data, held_out = normalised(outlier, seed), rows((96,)), rows((96,), 256, 2)
    scaled = activation_aware(model, data, in_blocks)
    assert error(scaled, model, held_out) < 1e-5
    made = quantize_weights(model, data, AWQ)
    assert error(made, model, held_out) < 0.95 * error(quantize_weights(model, data, PLAIN), model, held_out)


@settings(max_examples=12, deadline=None)
@given(spread=st.floats(0, 2), seed=st.integers(0, 50), samples=st.integers(2, 40))
def test_the_error_on_the_data_never_becomes_larger(spread: float, seed: int, samples: int) -> None:
    n, rng = Network(seed), np.random.default_rng(seed)
    first = (rng.normal(0, 0.3, (16, 48)) * rng.lognormal(0, spread, 48)).astype(np.float32)
    x = n.op("Relu", n.op("Gemm", "x", n.weight(first), n.normal(48)))
    n.gemm(x, 48, 8, name="y")
    model, data = n.artifact({"x": ["N", 16]}, {"y": ["N", 8]}), rows((16,), samples, seed)
    for without, options in ((PLAIN, AWQ), (GPTQ, BOTH)):
        before, after = (quantize_weights(model, data, chosen) for chosen in (without, options))
        errors = errors_on(data, model, before, after)
        assert errors[1].mean() <= errors[0].mean()


@pytest.mark.parametrize("name", NETWORKS)
def test_it_adds_to_reconstruction(name: str) -> None:
    make, size = NETWORKS[name]
    model, data, held_out = make(), rows(size), rows(size, 256, 2)
    made = {options: quantize_weights(model, data, options) for options in (PLAIN, AWQ, GPTQ, BOTH)}
    plain, scaled, rounded, both = (error(one, model, held_out) for one in made.values())
    assert scaled < plain
    assert both <= rounded < plain
    check_explained(model, made[BOTH], data)
    steps = [step.name for step in made[BOTH].provenance]
    assert steps in (["awq", "quantize_weights", "reconstruct"], ["quantize_weights", "reconstruct"])


def test_even_channels_stay() -> None:
    model, rng = normalised(1.0), np.random.default_rng(0)
    signs = rng.permuted(np.tile(np.float32([1, -1]), (64, 48)), axis=-1)
    data = make_dataset({"x": signs}, None)
    assert quantize_weights(model, data, AWQ).digest == quantize_weights(model, data, PLAIN).digest


def test_products_that_stay_float_do_not_count() -> None:
    model, data = transformer(), rows((8, 64))
    made = quantize_weights(model, data, WeightOnlyOptions(4, 32, "nearest", least_weights=64 * 256))
    links = next(step for step in made.provenance if step.name == "awq").facts["links"]
    # The queries, keys and values are smaller than the first product after the second normalisation.
    assert [link["alpha"] is None for link in links.values()] == [True, False]


def test_without_time_nothing_changes() -> None:
    model, data = normalised(), rows((96,))
    nearest = quantize_weights(model, None, BOTH)
    assert improved(model, nearest, data, BOTH, time_s=0.0) is nearest
