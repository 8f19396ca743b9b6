from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings

import networks
from benchmarks.models import GraphBuilder
from linear_graphs import ROWS, chains
from networks import Network, images
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidModel
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.operators import OPERATORS
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.parity import check_parity, parity, relative_error
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.tensor import DataType

_DIGITS = Path(__file__).parents[4] / "examples" / "digits"


def _data(*shape: int, name: str = "x") -> Dataset:
    return make_dataset({name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}, None)


def _encoder(path: Path) -> Artifact:
    """Two layers of the encoder of the benchmarks, narrower."""
    width, heads, tokens = 32, 4, 10
    graph, x = GraphBuilder(), "input"
    for _ in range(2):
        x = graph.layer_norm(graph.op("Add", x, graph.attention(x, width, heads)), width)
        inner = graph.gelu(graph.linear(x, width, 4 * width))
        x = graph.layer_norm(graph.op("Add", x, graph.linear(inner, 4 * width, width)), width)
    return Artifact.from_file(graph.save(path / "encoder.onnx", x, [tokens, width], [tokens, width]))


def test_digits() -> None:
    arrays = np.load(_DIGITS / "evaluate.npz")
    model = TrainableModel(Artifact.from_file(_DIGITS / "model.onnx"))
    assert 0 <= check_parity(model, make_dataset({"image": arrays["image"]}, None), rows=256) <= 1e-5


def test_an_encoder(tmp_path: Path) -> None:
    model = TrainableModel(_encoder(tmp_path))
    assert check_parity(model, _data(8, 10, 32, name="input")) <= 1e-5
    # Four products with biases, and Q, K and V as three: 2 x (6 weights + 6 biases + 2 x 2 of LayerNormalization).
    assert len(model.weights) == 32


@pytest.mark.parametrize("artifact", [networks.cnn(), networks.mlp(opset=13), networks.cnn(batch=4)])
def test_random_networks(artifact: Artifact) -> None:
    data = _data(8, 16) if (None, 16) in TrainableModel(artifact)._program.inputs.values() else None
    check_parity(TrainableModel(artifact), data or make_dataset({"x": images(8)}, None))


def test_attention_with_a_mask() -> None:
    check_parity(TrainableModel(networks.attention()), _data(8, 5, 32))


def test_a_quantised_graph_agrees_but_for_ties() -> None:
    data = make_dataset({"x": images(32)}, None)
    scheme = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
    found = ranges(collect(networks.cnn(), data.inputs), RangeMethod.MIN_MAX, scheme)
    # A sum that falls beside a tie of rounding moves one integer of 256.
    assert parity(TrainableModel(quantize(networks.cnn(), found, scheme)), data) < 0.02


def test_a_divergence_is_named() -> None:
    model = TrainableModel(networks.mlp())
    with torch.no_grad():
        model.weights["w2"].add_(0.1)
    data = _data(8, 16)
    assert parity(model, data) > 1e-2
    with pytest.raises(InvalidModel, match=r"first divergent tensor: 'gemm2' \(Gemm\)"):
        check_parity(model, data)


def test_nothing_is_trained_that_torch_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TrainableModel(networks.mlp())
    wrong = OPERATORS["", "Relu"]._replace(run=lambda _node, x: x.abs())
    monkeypatch.setitem(OPERATORS, ("", "Relu"), wrong)
    with pytest.raises(InvalidModel, match=r"outputs in torch differ.*\(Relu\)"):
        recover(model, _data(8, 16), networks.mlp(), FitOptions(epochs=1))


def nearly_tied(seed: int = 0) -> Artifact:
    """The places of the largest of values that differ by rounding alone, as floats."""
    n = Network(seed)
    same = n.op("Sigmoid", n.op("MatMul", n.op("Mul", "x", n.weight(np.float32(1e-7))), n.normal(8, 200)))
    n.op("Cast", n.op("ArgMax", same, axis=1), to=1, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 1]})


def test_rounding_that_the_model_amplifies_is_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = TrainableModel(nearly_tied()), _data(64, 8)
    exact = OPERATORS["", "Sigmoid"]
    rounded = exact._replace(run=lambda node, x: exact.run(node, x) * (1 + 6e-8 * torch.randn(x.shape)))
    monkeypatch.setitem(OPERATORS, ("", "Sigmoid"), rounded)
    model = TrainableModel(nearly_tied())
    assert check_parity(model, data) > 0.01
    wrong = OPERATORS["", "ArgMax"]._replace(run=lambda node, x: x.argmin(1, keepdim=True))
    monkeypatch.setitem(OPERATORS, ("", "ArgMax"), wrong)
    with pytest.raises(InvalidModel, match=r"\(ArgMax\)"):
        check_parity(TrainableModel(nearly_tied()), data)


def test_integers_that_a_tie_may_flip_are_no_divergence() -> None:
    n = Network()
    n.op("ArgMax", "x", axis=1, keepdims=0, name="best")
    n.op("Mul", "x", n.weight(np.float32([1, 2])), name="y")
    artifact = n.artifact({"x": ["N", 2]}, {"y": ["N", 2]})
    assert parity(TrainableModel(artifact), _data(4, 2)) == 0.0


def test_relative_error_counts_against_the_largest() -> None:
    want = np.float32([1.0, -10.0, np.nan, np.inf])
    assert relative_error(want, want) == 0.0
    assert relative_error(np.float32([1.1, -10.0, np.nan, np.inf]), want) == pytest.approx(0.01, rel=1e-5)
    assert relative_error(np.float32([1.0, -10.0, 0.0, np.inf]), want) == np.inf
    assert relative_error(np.float32([np.nan, -10.0, np.nan, np.inf]), want) == np.inf
    assert relative_error(want[:2], want) == np.inf
    assert relative_error(np.float32([0.5]), np.float32([0.0])) == 0.5


@settings(max_examples=30, deadline=None)
@given(chains())
def test_every_form_of_a_product_is_computed(graphs: tuple[Artifact, Artifact]) -> None:
    assert parity(TrainableModel(graphs[0]), make_dataset({"x": ROWS}, None)) < 1e-5


def test_an_output_that_is_a_weight_is_compared_too() -> None:
    n = Network()
    n.op("Relu", "x", name="y")
    n.op("Expand", n.normal(3, 4), n.op("Shape", "x"), name="z")
    artifact = n.artifact({"x": [3, 4]}, {"y": [3, 4], "z": [3, 4]})
    assert parity(TrainableModel(artifact, trained=["w0"]), _data(3, 4)) == 0
    n = Network()
    n.op("Relu", "x", name="y")
    n.weights.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "z"))
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4], "z": [4]})
    assert parity(TrainableModel(artifact, trained=["z"]), _data(3, 4)) == 0
