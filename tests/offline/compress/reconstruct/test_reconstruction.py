"""Better integers for the same scales: each layer is at least as close to the float layer on the data, and the rest stays the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import networks
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, Unsupported
from penstock.measurement import Interval
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement, float_model
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.reconstruct import reconstruction
from penstock.offline.compress.reconstruct.reconstruction import reconstruct
from penstock.offline.compress.restored.unrounded import with_float_products
from penstock.offline.compress.taps import Taps
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import sample_errors
from penstock.offline.model_store import keep_models
from penstock.offline.optimize.optimizer import optimize
from penstock.tensor import Array, DataType
from tests.fuzz.offline import data_of
from tests.random_models import RandomModel, make_genes

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")


def rows(*shape: int, count: int = 64, seed: int = 0) -> Dataset:
    return make_dataset({"x": np.random.default_rng(seed).standard_normal((count, *shape)).astype(np.float32)}, None)


def int8(artifact: Artifact, data: Dataset, scheme: IntegerScheme = SCHEME) -> Artifact:
    return quantize(artifact, ranges(collect(artifact, data), RangeMethod.MIN_MAX, scheme), scheme, QdqPlacement.WIDE)


def nearest(artifact: Artifact, bits: int, block: int = 16) -> Artifact:
    options = WeightOnlyOptions(bits, block, integer_products=False, least_weights=1)  # type: ignore[arg-type]
    return quantize_weights(artifact, None, options)


def constants(artifact: Artifact) -> dict[str, Array]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def error(original: Artifact, made: Artifact, data: Dataset) -> float:
    answers = (answers_of(with_float_products(one), data, as_written=True) for one in (original, made))
    return float(sample_errors(*answers).mean())


def layer_errors(original: Artifact, quantised: Artifact, data: Dataset) -> Iterator[float]:
    """The squared error of each layer's results from its weights alone, on the float inputs of all samples."""
    layers = reconstruction._Layers(original, quantised)
    for layer in layers.found:
        weight, grid = layers._read(layer)
        wrong = weight - grid.nearest * grid.scale
        taps = Taps(float_model(original).artifact(), data)
        batches = (layer.source.rows(array, 10**9) for _, array in taps.run([layer.source.tensor]))
        yield sum(float(np.square(batch @ wrong, dtype=np.float64).sum()) for batch in batches)


MODELS = {
    "cnn": (networks.cnn(16), (3, 12, 12)),
    "mlp": (networks.mlp(50), (16,)),
    "attention": (networks.attention(36), (5, 36)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["int8", "per-tensor", "4", "8"])
def test_results_are_closer_on_fresh_samples(name, kind):
    artifact, shape = MODELS[name]
    data, fresh = rows(*shape, count=256), rows(*shape, count=128, seed=1)
    if kind.isdigit():
        before = nearest(artifact, int(kind))
    else:
        before = int8(artifact, data, IntegerScheme(DataType.UINT8, DataType.INT8, True, "", kind == "per-tensor"))
    made = reconstruct(artifact, before, data)
    assert made.provenance[-1].name == "reconstruct"
    assert made.source is before
    assert error(artifact, made, fresh) < 0.97 * error(artifact, before, fresh)
    errors = list(zip(layer_errors(artifact, made, data), layer_errors(artifact, before, data), strict=True))
    assert all(after <= 1.001 * first for after, first in errors)
    assert sum(after < 0.99 * first for after, first in errors) == len(made.provenance[-1].facts["changed"])
    assert reconstruct(artifact, before, data).data == made.data


@settings(max_examples=25, deadline=None)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 6),
    count=st.sampled_from([1, 2, 3, 64]),
    rank=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    block=st.sampled_from([16, 32]),
    transposed=st.booleans(),
    seed=st.integers(0, 100),
)
def test_blocks_of_any_size_differ_by_one_step_at_most(  # noqa: PLR0917
    inputs, outputs, count, rank, bits, block, transposed, seed
):
    """Ragged last blocks, few samples, inputs that depend on each other, and inputs that are always zero."""
    rng, n = np.random.default_rng(seed), Network(seed)
    weight = n.normal(outputs, inputs) if transposed else n.normal(inputs, outputs)
    n.op("Gemm", "x", weight, name="y", transB=int(transposed))
    artifact = n.artifact({"x": ["N", inputs]}, {"y": ["N", outputs]})
    x = rng.standard_normal((count, rank)) @ rng.standard_normal((rank, inputs)) * (rng.random(inputs) > 0.2)
    data = make_dataset({"x": x.astype(np.float32)}, None)
    before = nearest(artifact, bits, block)
    made = reconstruct(artifact, before, data)
    check_explained(artifact, made, data)  # at most one step
    for after, first in zip(layer_errors(artifact, made, data), layer_errors(artifact, before, data), strict=True):
        assert after <= 1.001 * first + 1e-6
    if made is not before:
        assert error(artifact, made, data) < 1.0


def test_random_models_keep_everything_but_integers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reconstruction, "mean_interval", lambda _: Interval(1, 1, 1))  # accept all changes of layers
    changed = 0
    for seed in range(40):
        model = RandomModel(make_genes(seed))
        if model.float is not np.float32:
            continue
        artifact, _ = optimize(model.artifact())
        data = data_of(model, artifact)
        try:
            before = int8(artifact, data)
            made = reconstruct(artifact, before, data)
        except (Unsupported, InvalidArgument):
            continue
        check_explained(artifact, made, data)
        for after, first in zip(layer_errors(artifact, made, data), layer_errors(artifact, before, data), strict=True):
            assert after <= 1.01 * first + 1e-6
        changed += made is not before
    assert changed >= 5


def test_weights_on_the_grid_stay():
    n = Network()
    weight = np.random.default_rng(0).integers(-7, 8, (32, 4)).astype(np.float32) / 8
    weight[0] = weight[16] = 1
    n.op("MatMul", "x", n.weight(-weight), name="y")
    artifact, data = n.artifact({"x": ["N", 32]}, {"y": ["N", 4]}), rows(32)
    before = nearest(artifact, 4)
    assert error(artifact, before, data) < 1e-6
    assert reconstruct(artifact, before, data) is before


def test_a_weight_that_two_layers_share_stays():
    n = Network()
    shared = n.normal(8, 8)
    x = n.op("MatMul", n.op("Relu", n.op("MatMul", "x", shared)), shared)
    n.op("MatMul", x, n.normal(8, 8), name="y")
    artifact, data = n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}), rows(8)
    for before in (int8(artifact, data), nearest(artifact, 4)):
        assert len(reconstruction._Layers(artifact, before).found) == 1
        check_explained(artifact, reconstruct(artifact, before, data), data)


def test_zeros_stay_zero():
    n = Network()
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    weight[np.abs(weight) < 0.5] = 0
    n.op("MatMul", "x", n.weight(weight), name="y")
    artifact = n.artifact({"x": ["N", 64]}, {"y": ["N", 8]})
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((256, 9)) @ rng.standard_normal((9, 64))).astype(np.float32)
    data = make_dataset({"x": x}, None)
    made = reconstruct(artifact, int8(artifact, data), data)
    (name,) = made.provenance[-1].facts["changed"]
    assert not constants(made)[name][weight == 0].any()


def test_limits_of_time_and_memory(monkeypatch):
    artifact, shape = MODELS["mlp"]
    data = rows(*shape, count=256)
    before = int8(artifact, data)
    assert reconstruct(artifact, before, data, time_s=0) is before
    whole, passes = reconstruct(artifact, before, data), []
    monkeypatch.setattr(reconstruction, "_LEAST_BYTES", 0)
    observe = reconstruction.observe
    monkeypatch.setattr(reconstruction, "observe", lambda *given: passes.append(given[1]) or observe(*given))
    monkeypatch.setattr(reconstruction, "_COPIES", 0.99 * artifact.size_bytes / (2 * 4 * 50**2))
    assert reconstruct(artifact, before, data).data == whole.data
    assert [len(one) for one in passes] == [1, 1, 1]  # each layer in a pass by itself
    monkeypatch.setattr(reconstruction, "_COPIES", artifact.size_bytes)
    assert reconstruct(artifact, before, data) is before


def test_an_error_that_provably_rises_is_not_accepted(monkeypatch):
    artifact, shape = MODELS["mlp"]
    data = rows(*shape, count=256)
    before = int8(artifact, data)
    monkeypatch.setattr(reconstruction, "rounded", lambda _, grid, __: np.clip(grid.nearest + 1, -64, 64).astype("i1"))
    assert reconstruct(artifact, before, data) is before


def test_within_a_build_layers_are_reconstructed_once(monkeypatch):
    artifact, shape = MODELS["cnn"]
    data, seen = rows(*shape), []
    rounded = reconstruction.rounded
    monkeypatch.setattr(reconstruction, "rounded", lambda *given: seen.append(given) or rounded(*given))
    with keep_models(1 << 30):
        found = ranges(collect(artifact, data), RangeMethod.MSE, SCHEME)
        made = [reconstruct(artifact, quantize(artifact, found, SCHEME, place), data) for place in QdqPlacement]
    assert len(seen) == 4
    assert len({one.digest for one in made}) == 2
    assert all(one.provenance[-1].name == "reconstruct" for one in made)


def test_a_fixed_batch():
    artifact = networks.cnn(8, batch=4)
    data = make_dataset({"x": networks.images(16)}, None)
    made = reconstruct(artifact, int8(artifact, data), data)
    check_explained(artifact, made, data)
