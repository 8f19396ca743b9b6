"""The choice of weights: rules compared with plain loops, the definition of a weight, and the resulting file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig, InvalidModel, Unsupported
from penstock.offline.compress.pruning.magnitude import (
    DeviationRule,
    GlobalRule,
    LayerRule,
    PruneOptions,
    prunable_weights,
    prune,
    smallest,
    sparsity,
)
from penstock.offline.optimize.model import load_model

# Few distinct values, so that ties are common.
_layers = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=12), min_size=1, max_size=4)


def _weights(layers: list[list[int]]) -> dict[str, np.ndarray]:
    return {f"w{n}": np.array(layer, np.float32).reshape(1, -1) for n, layer in enumerate(layers)}


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    proto = onnx.load_model_from_string(artifact.data)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@given(st.lists(st.integers(-3, 3), max_size=20), st.integers(0, 20))
def test_the_smallest_are_those_that_a_stable_sort_puts_first(values: list[int], count: int) -> None:
    scores, count = np.array(values, np.float32), min(count, len(values))
    wanted = np.zeros(len(values), bool)
    wanted[np.argsort(scores, kind="stable")[:count]] = True
    assert np.array_equal(smallest(scores, count), wanted)


@given(_layers, st.floats(0, 1), st.floats(0, 1))
def test_the_global_rule_against_a_plain_loop(layers: list[list[int]], share: float, cap: float) -> None:
    weights = _weights(layers)
    ranked = sorted(
        (abs(value), number, place) for number, layer in enumerate(layers) for place, value in enumerate(layer)
    )
    allowed = [int(cap * len(layer)) for layer in layers]
    goal = int(share * len(ranked))
    removed: set[tuple[int, int]] = set()
    for _, number, place in ranked:
        if len(removed) < goal and allowed[number]:
            allowed[number] -= 1
            removed.add((number, place))
    rule = GlobalRule(share, cap)
    if len(removed) < goal and share > cap:
        with pytest.raises(InvalidConfig, match="ask for at most .*%, or, in Python, raise layer_cap"):
            rule.masks(weights)
        return
    masks = rule.masks(weights)
    found = {(n, place) for n, name in enumerate(weights) for place in np.flatnonzero(~masks[name].reshape(-1))}
    assert found == removed


@given(_layers, st.floats(0, 1))
def test_each_layer_to_its_own_share(layers: list[list[int]], share: float) -> None:
    weights = _weights(layers)
    masks = LayerRule({"w0": share}).masks(weights)
    assert (~masks["w0"]).sum() == int(share * weights["w0"].size)
    kept, gone = (np.abs(weights["w0"])[masks["w0"] == here] for here in (True, False))
    assert gone.max(initial=0) <= kept.min(initial=np.inf)
    assert all(masks[name].all() for name in weights if name != "w0")


def test_below_a_multiple_of_the_deviation() -> None:
    array = np.random.default_rng(0).normal(size=(30, 30)).astype(np.float32)
    masks = DeviationRule(1.5).masks({"w": array})
    assert np.array_equal(masks["w"], np.abs(array) >= 1.5 * array.astype(np.float64).std())
    assert DeviationRule(1e9).masks({"w": array})["w"].sum() == 1, "the largest stays"


@pytest.mark.parametrize("rule", [GlobalRule(0.8), LayerRule({"w": 0.8}), DeviationRule(1.2)])
def test_rules_grow_with_their_factor(rule: GlobalRule | LayerRule | DeviationRule) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(20, 20)).astype(np.float32)}
    before = np.ones((20, 20), bool)
    for factor in (0.0, 0.3, 0.7, 1.0):
        mask = rule.scaled(factor).masks(weights)["w"]
        assert (mask <= before).all()
        before = mask
    assert np.array_equal(before, rule.masks(weights)["w"])


def test_weights_are_what_products_read() -> None:
    n = Network()
    table, shared = n.normal(10, 8), n.normal(8, 8)
    x = n.op("Gather", table, "x")
    x = n.op("MatMul", n.op("MatMul", x, shared), shared)
    x = n.op("LayerNormalization", x, n.normal(8), n.normal(8))
    tied = n.normal(8, 8)
    x = n.op("Add", n.op("MatMul", x, tied), tied)
    n.op("Identity", x, name="y")
    artifact = n.artifact({"x": [8]}, {"y": [8, 8]})
    proto = onnx.load_model_from_string(artifact.data)
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model = load_model(Artifact.from_bytes(proto.SerializeToString()))
    assert list(prunable_weights(model)) == [shared], "read twice, there once; neither tables nor what is added too"
    assert list(prunable_weights(model, PruneOptions(embeddings=True))) == [table, shared]
    with pytest.raises(InvalidConfig, match="nowhere"):
        prunable_weights(model, PruneOptions(skip=("nowhere",)))
    with pytest.raises(Unsupported, match="no weight"):
        prunable_weights(model, PruneOptions(skip=(shared,)))


def test_the_pruned_file() -> None:
    artifact = cnn()
    options = PruneOptions(GlobalRule(0.7))
    pruned = prune(artifact, options)
    before, after = _arrays(artifact), _arrays(pruned)
    masks = options.rule.masks(prunable_weights(load_model(artifact)))
    for name, array in before.items():
        assert np.array_equal(after[name], array * masks[name] if name in masks else array)
    facts = pruned.provenance[-1].facts
    assert facts == sparsity(pruned)
    assert facts["sparsity"] == pytest.approx(0.7, abs=1e-3)
    assert facts["fewer"] == pytest.approx(1 / 0.3, rel=1e-2)
    assert facts["nonzero"] == sum(int(mask.sum()) for mask in masks.values())
    assert prune(artifact, options).digest == pruned.digest
    outputs = (
        get_engine("onnxruntime").load(pruned, {"threads": 1}).forward({"x": np.zeros((2, 3, 12, 12), np.float32)})
    )
    assert outputs["y"].shape == (2, 10)


def test_pruning_again_keeps_what_is_gone() -> None:
    once = prune(mlp(), PruneOptions(GlobalRule(0.5)))
    twice = prune(once, PruneOptions(GlobalRule(0.8)))
    first, second = _arrays(once), _arrays(twice)
    assert all(not second[name][array == 0].any() for name, array in first.items())


def test_half_precision_stays_half() -> None:
    n = Network()
    half = n.weight(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float16))
    n.op("Cast", n.op("MatMul", n.op("Cast", "x", to=10), half), to=1, name="y")
    pruned = prune(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), PruneOptions(GlobalRule(0.5)))
    assert _arrays(pruned)[half].dtype == np.float16
    assert (_arrays(pruned)[half] == 0).sum() == 32


def test_weights_that_are_no_numbers_are_refused() -> None:
    n = Network()
    n.op("MatMul", "x", n.weight(np.array([[1, np.nan]], np.float32)), name="y")
    with pytest.raises(InvalidModel, match="NaN"):
        prune(n.artifact({"x": ["N", 1]}, {"y": ["N", 2]}))
