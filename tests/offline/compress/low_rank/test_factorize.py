"""Factorisation end to end: moments from data, choice by measured times, and the bound on the error."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest

import networks
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.low_rank import factorize as module
from penstock.offline.compress.low_rank.convolution import Way, products
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, break_even, factorize
from penstock.offline.compress.low_rank.layers import SplittableLayer
from penstock.tensor import Array


def run(artifact: Artifact, data: Dataset) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward(data.inputs)["y"]


def error(changed: Artifact, original: Artifact, data: Dataset) -> float:
    want = run(original, data)
    return float(np.linalg.norm(run(changed, data) - want) / np.linalg.norm(want))


@functools.cache
def thin() -> tuple[Artifact, Dataset]:
    """x (N, 96) to y (N, 64) through 128 channels; the data lie near 8 directions, and the weights have full rank."""
    n, rng = Network(7), np.random.default_rng(7)
    x = n.op("Relu", n.gemm("x", 96, 128))
    n.op("Add", n.op("MatMul", x, n.normal(128, 64, fan_in=128)), n.normal(64), name="y")
    x = rng.standard_normal((256, 8)) @ rng.standard_normal((8, 96)) + 0.01 * rng.standard_normal((256, 96)) + 1
    return n.artifact({"x": ["N", 96]}, {"y": ["N", 64]}), make_dataset({"x": x.astype(np.float32)}, None)


@functools.cache
def picture(batch: int | str = "N") -> tuple[Artifact, Dataset]:
    """x (N, 3, 12, 12) to y: two convolutions that are large enough to split, with weights of nearly low rank."""
    n, rng = Network(8), np.random.default_rng(8)
    x = n.op("Relu", n.conv("x", 3, 64))
    for _ in range(2):
        low = np.einsum("or,rcyx->ocyx", rng.standard_normal((64, 6)), rng.standard_normal((6, 64, 3, 3))) / 50
        weight = n.weight((low + 1e-4 * rng.standard_normal(low.shape)).astype(np.float32))
        x = n.op("Relu", n.op("Conv", x, weight, n.normal(64), pads=[1, 1, 1, 1]))
    n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), 64, 10, name="y")
    return n.artifact({"x": [batch, 3, 12, 12]}, {"y": [batch, 10]}), make_dataset({"x": networks.images(48)}, None)


@pytest.fixture
def _times_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the time of a layer is proportional to its multiplications."""

    def measure(layer: SplittableLayer, _shape: tuple[int, ...], ways: list[Way], _threads: int) -> dict[Way, float]:
        return {way: products(layer.weight.shape, *way) / 1e5 for way in ways}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "_MODEL_SECONDS", 0.01)


def test_a_rank_by_name_keeps_what_the_data_use() -> None:
    artifact, data = thin()
    aware, plain = (factorize(artifact, data, FactorizeOptions(rank=16, aware=aware)) for aware in (True, False))
    by_data, by_weights = (error(found, artifact, data) for found in (aware, plain))
    assert by_data < 0.2
    assert by_weights > 3 * by_data
    facts = aware.provenance[-1].facts
    assert [layer["ranks"] for layer in facts["layers"].values()] == [[16], [16]]
    assert [layer["weights"] for layer in facts["layers"].values()] == [
        round(16 * (96 + 128) / (96 * 128), 4),
        round(16 * (128 + 64) / (128 * 64), 4),
    ]
    assert aware.size_bytes < 0.4 * artifact.size_bytes


def test_the_same_arguments_give_the_same_bytes() -> None:
    artifact, data = thin()
    assert (
        factorize(artifact, data, FactorizeOptions(rank=16)).digest
        == factorize(artifact, data, FactorizeOptions(rank=16)).digest
    )


def test_a_rank_beyond_break_even_is_refused() -> None:
    artifact, data = thin()
    assert break_even((128, 64)) == pytest.approx(42.67, abs=0.01)
    kept = factorize(artifact, data, FactorizeOptions(rank=48)).provenance[-1].facts["layers"]
    assert len(kept) == 1, "48 lies between the limits of the two products"
    for rank in (0, -1, 60):
        with pytest.raises(InvalidArgument, match="rank"):
            factorize(artifact, data, FactorizeOptions(rank=rank))


@pytest.mark.usefixtures("_times_by_products")
@pytest.mark.parametrize("form", ["channel", "spatial", "tucker"])
def test_layers_are_split_within_the_error(form: str) -> None:
    artifact, data = picture()
    options = FactorizeOptions(max_error=0.3, forms=(form,), rows=8, min_ms=0.01, samples=16)
    found = factorize(artifact, data, options)
    facts = found.provenance[-1].facts
    assert facts["error"] <= 0.3
    assert facts["layers"]
    assert {layer["form"] for layer in facts["layers"].values()} == {form}
    assert facts["promised_speedup"] > 1
    operators = [node.op_type for node in onnx.load_model_from_string(found.data).graph.node]
    assert operators.count("Conv") == 3 + len(facts["layers"]) * (2 if form == "tucker" else 1)
    assert error(found, artifact, data) < 0.4
    for name in facts["layers"]:
        assert facts["table"][name]["whole"] > 0


@pytest.mark.usefixtures("_times_by_products")
def test_nothing_is_split_where_no_error_is_allowed() -> None:
    artifact, data = picture()
    found = factorize(artifact, data, FactorizeOptions(max_error=0.0, rows=8, min_ms=0.01, samples=16))
    assert found.provenance[-1].facts["layers"] == {}
    assert found.provenance[-1].facts["promised_speedup"] == 1.0
    assert np.array_equal(run(found, data), run(artifact, data))


@pytest.mark.usefixtures("_times_by_products")
def test_who_accepts_decides_and_a_target_ends_the_way() -> None:
    artifact, data = picture()
    options = FactorizeOptions(max_error=0.0, rows=8, min_ms=0.01, samples=16)
    seen: list[Artifact] = []

    def accept(candidate: Artifact) -> bool:
        seen.append(candidate)
        return True

    everything = factorize(artifact, data, options, accept=accept).provenance[-1].facts
    assert len(seen) == 1
    assert everything["stop"][0] == everything["stop"][1] > 0
    little = FactorizeOptions(rows=8, min_ms=0.01, samples=16, target_speedup=1.0001)
    facts = factorize(artifact, data, little, accept=accept).provenance[-1].facts
    assert facts["stop"][1] == 1


@pytest.mark.usefixtures("_times_by_products")
def test_one_tensor_read_along_two_axes() -> None:
    n = Network(9)
    x = n.op("Relu", n.conv("x", 3, 64))
    along_rows = n.op("ReduceMean", n.op("MatMul", x, n.normal(12, 12)), axes=[2, 3], keepdims=0)
    along_channels = n.op("Flatten", n.op("GlobalAveragePool", n.conv(x, 64, 64)))
    n.op("Add", along_rows, along_channels, name="y")
    artifact = n.artifact({"x": ["N", 3, 12, 12]}, {"y": ["N", 64]})
    data = make_dataset({"x": networks.images(24)}, None)
    found = factorize(artifact, data, FactorizeOptions(min_ms=0.0, max_error=0.9, samples=8))
    assert found.provenance[-1].facts["layers"]


@pytest.mark.usefixtures("_times_by_products")
def test_a_fixed_batch_is_fine() -> None:
    artifact, data = picture(4)
    found = factorize(artifact, data, FactorizeOptions(min_ms=0.01, samples=8, forms=("channel",), max_error=0.5))
    shape = get_engine("onnxruntime").load(found, {"threads": 1}).signature.inputs[0].shape
    assert shape[0] == 4


def test_times_are_measured() -> None:
    """Sixteen results of 64×3×3 inputs and 64 of 16 are so much less than 64 of 64×3×3 that any machine finds it faster."""
    artifact, data = picture()
    options = FactorizeOptions(max_error=0.5, forms=("channel",), rows=8, min_ms=0.0, samples=16)
    facts = factorize(artifact, data, options).provenance[-1].facts
    assert facts["layers"]
    assert facts["promised_speedup"] > 1
    assert all(ms > 0 for times in facts["table"].values() for ms in times.values())


def test_few_samples_serve_for_both_and_progress_is_told() -> None:
    artifact, data = thin()
    steps: list[tuple[int, int]] = []
    few = make_dataset(data.rows(0, 3), None)
    found = factorize(artifact, few, FactorizeOptions(rank=16), progress=lambda *step: steps.append(step))
    assert np.isfinite(run(found, few)).all()
    assert steps[-1][0] == steps[-1][1]


def test_bad_input_is_refused() -> None:
    artifact, data = thin()
    with pytest.raises(InvalidData):
        factorize(artifact, make_dataset({"z": data.inputs["x"]}, None))
    with pytest.raises(Unsupported, match="ms"):
        factorize(artifact, data, FactorizeOptions(min_ms=1e6))
    for options in (FactorizeOptions(forms=("cp",)), FactorizeOptions(max_error=2.0), FactorizeOptions(rows=0)):
        with pytest.raises(InvalidArgument, match="forms|max_error|rows"):
            factorize(artifact, data, options)
    n = Network()
    n.op("Relu", "x", name="y")
    with pytest.raises(Unsupported, match="no layer"):
        factorize(n.artifact({"x": ["N", 96]}, {"y": ["N", 96]}), data)
