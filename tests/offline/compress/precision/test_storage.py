"""Weights stored as integers: the numbers of the rounded weights, in every engine, whatever the ids."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import networks
import stored_models
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import available_engines, get_engine
from penstock.errors import PenstockError, Unsupported
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.half import halve_weights
from penstock.offline.compress.precision.storage import (
    StorageOptions,
    share_of_tables,
    store_tables,
    store_weights,
)
from penstock.tensor import Array

SMALL = StorageOptions(least_weights=64)
FOUR = StorageOptions(table_bits=4, least_weights=64)


def run(artifact: Artifact, inputs: dict[str, Array], engine: str = "onnxruntime") -> dict[str, Array]:
    return get_engine(engine).load(artifact, {"threads": 1}).forward(inputs)


def ids_like(rows: int, rank: int = 2, dtype: type = np.int64) -> Dataset:
    """Samples for ``stored_models.embedding``. Ids that are generated without data would be of too many sizes."""
    shape = (16, *(3,) * (rank - 1))
    return make_dataset({"ids": np.random.default_rng(0).integers(0, rows, shape).astype(dtype)}, None)


def rounded_rows(weight: Array) -> Array:
    """``weight`` with each row rounded to whole steps of its largest magnitude over 127."""
    steps = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True) / np.float32(127)
    steps[steps == 0] = 1
    return np.asarray(np.rint(weight / steps) * steps, np.float32)


def rounded_blocks(weight: Array, size: int) -> Array:
    """``weight`` in blocks of 4 bits, the largest magnitude of a block being the integer -8."""
    blocks = weight.reshape(len(weight), -1, size)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)
    steps = -largest / 8
    return np.asarray(np.clip(np.rint(blocks / np.where(steps, steps, 1)), -8, 7) * steps, np.float32).reshape(
        weight.shape
    )


@given(
    rows=st.integers(1, 40),
    width=st.one_of(st.integers(8, 70), st.sampled_from([16, 32, 48, 96])),
    rank=st.integers(0, 3),
    kind=st.sampled_from([TensorProto.INT32, TensorProto.INT64]),
    bits=st.sampled_from([4, 8]),
    opset=st.sampled_from([9, 11, 13, 17, 21]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_table_gathers_the_rounded_rows(rows, width, rank, kind, bits, opset, seed):
    weight = stored_models.table(rows, width, seed)
    artifact = stored_models.embedding(weight, kind, rank, opset)
    try:
        stored = store_weights(artifact, StorageOptions(table_bits=bits, least_weights=1, tables_only=True))
    except Unsupported:
        assert not weight.any() or width < 8
        return
    facts = stored.provenance[-1].facts["layers"]["table"]
    size = next((size for size in (32, 16) if width % size == 0), None)
    assert facts["bits"] == (4 if bits == 4 and size and opset >= 11 else 8)
    want = rounded_blocks(weight, size) if facts["bits"] == 4 and size else rounded_rows(weight)
    dtype = {TensorProto.INT32: np.int32, TensorProto.INT64: np.int64}[kind]
    lowest = -rows if opset >= 11 else 0
    rng = np.random.default_rng(seed)
    for shape in ((3,) * rank, (1,) * rank, (0,) * rank):
        # Before opset 11, ids are not negative.
        ids = rng.integers(lowest, rows, shape).astype(dtype)
        np.testing.assert_allclose(run(stored, {"ids": ids})["e"], want[ids], rtol=1e-6, atol=1e-30)
    if rank:
        check_explained(artifact, stored, ids_like(rows, rank, dtype))


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("options", [SMALL, FOUR])
def test_every_engine_runs_it(engine: str, options: StorageOptions) -> None:
    artifact = stored_models.embedding(stored_models.table())
    ids = np.array([[0, 3, 49], [7, 7, 1]])
    want = run(store_weights(artifact, options), {"ids": ids})
    for name, array in run(store_weights(artifact, options), {"ids": ids}, engine).items():
        # OpenVINO may round the activations of a product with stored weights.
        assert np.linalg.norm(array - want[name]) <= (1e-5 if name == "e" else 0.01) * np.linalg.norm(want[name])


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("options", [SMALL, FOUR])
@pytest.mark.parametrize("wrong", [50, -51])
def test_ids_out_of_range_are_errors(engine: str, options: StorageOptions, wrong: int) -> None:
    stored = store_weights(stored_models.embedding(stored_models.table()), options)
    with pytest.raises(PenstockError):
        run(stored, {"ids": np.array([[0, wrong]])}, engine)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_zeros_stay_zero_and_tables_shrink(bits: int) -> None:
    artifact = stored_models.embedding(stored_models.table(1000, 64))
    stored = store_weights(artifact, StorageOptions(table_bits=bits))
    assert stored.size_bytes < {4: 0.18, 8: 0.28}[bits] * artifact.size_bytes
    assert not run(stored, {"ids": np.array([[0]])})["e"].any()
    onnx.checker.check_model(onnx.load_model_from_string(stored.data), full_check=True)
    assert stored.data == store_weights(artifact, StorageOptions(table_bits=bits)).data
    assert stored.provenance[-1].source_digest == artifact.digest


@pytest.mark.parametrize("bits", [4, 8])
def test_several_gathers_share_one_table(bits: int) -> None:
    nodes = [helper.make_node("Gather", ["t", name], [f"e_{name}"]) for name in "ab"]
    nodes.append(helper.make_node("Add", ["e_a", "e_b"], ["y"]))
    inputs = {name: (TensorProto.INT64, ["N"]) for name in "ab"}
    artifact = stored_models.model(nodes, inputs, {"y": ["N", 32]}, {"t": stored_models.table()})  # type: ignore[arg-type]
    stored = store_weights(artifact, StorageOptions(table_bits=bits, least_weights=64))
    arrays = [numpy_helper.to_array(one) for one in onnx.load_model_from_string(stored.data).graph.initializer]
    assert sum(array.dtype.itemsize == 1 for array in arrays) == 1
    assert not any(array.size == 50 * 32 and array.dtype == np.float32 for array in arrays)
    check_explained(artifact, stored)


def test_a_table_that_is_also_a_projection_is_stored_once() -> None:
    weight = stored_models.table(40, 32)
    artifact = stored_models.embedding(weight, rank=1, tied=True)
    assert store_tables(artifact) is artifact
    stored = store_weights(artifact, SMALL)
    assert stored.size_bytes < 0.5 * artifact.size_bytes
    ids = np.arange(-40, 40)
    rows = rounded_rows(weight)
    np.testing.assert_allclose(run(stored, {"ids": ids})["y"], rows[ids] @ rows.T, rtol=1e-4, atol=1e-3)
    check_explained(artifact, stored, ids_like(40, 1))


LAYERS = {
    "Conv": (lambda n: n.op("Conv", "x", n.normal(6, 4, 3, 3), n.normal(6), name="y", pads=[1] * 4), [6, 9, 9]),
    "group": (lambda n: n.op("Conv", "x", n.normal(8, 1, 3, 3), name="y", group=4, pads=[1] * 4), [8, 9, 9]),
    "ConvTranspose": (lambda n: n.op("ConvTranspose", "x", n.normal(4, 6, 3, 3), name="y"), [6, 11, 11]),
    "Gemm": (lambda n: n.op("Gemm", n.op("Flatten", "x"), n.normal(9, 324), name="y", transB=1, alpha=0.5), [9]),
    "MatMul": (lambda n: n.op("MatMul", "x", n.normal(9, 20), name="y"), [4, 9, 20]),
    "stacked": (lambda n: n.op("MatMul", "x", n.normal(4, 9, 5), name="y"), [4, 9, 5]),
    "left": (lambda n: n.op("MatMul", n.normal(20, 9), "x", name="y"), [4, 20, 9]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_with_rounded_weights(name: str) -> None:
    n = networks.Network()
    add, shape = LAYERS[name]
    add(n)
    artifact = n.artifact({"x": ["N", 4, 9, 9]}, {"y": ["N", *shape]})
    stored = store_weights(artifact, StorageOptions(least_weights=32))
    x = np.random.default_rng(0).standard_normal((3, 4, 9, 9)).astype(np.float32)
    want, got = run(artifact, {"x": x})["y"], run(stored, {"x": x})["y"]
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
    found = check_explained(artifact, stored)
    assert any(one.reason.startswith("without its own change") for one in found)


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_stored_too(op_type: str) -> None:
    artifact = stored_models.recurrent(op_type, states=True)
    stored = store_weights(artifact, SMALL)
    assert set(stored.provenance[-1].facts["layers"]) == {"W", "R"}
    inputs = stored_models.recurrent_inputs(artifact, 5, 2)
    want, got = run(artifact, inputs), run(stored, inputs)
    for key, array in want.items():
        assert np.linalg.norm(got[key] - array) < 0.02 * np.linalg.norm(array)
    check_explained(artifact, stored)


def test_weights_that_others_read_stay() -> None:
    weight = stored_models.table(40, 32)
    nodes = [helper.make_node("Gather", ["t", "ids"], ["e"]), helper.make_node("Relu", ["t"], ["y"])]
    inputs = {"ids": (TensorProto.INT64, ["N"])}
    outputs = {"e": ["N", 32], "y": [40, 32]}
    read = stored_models.model(nodes, inputs, outputs, {"t": weight})  # type: ignore[arg-type]
    along = stored_models.model(
        [helper.make_node("Gather", ["t", "ids"], ["e"], axis=1)], inputs, {"e": [40, "N"]}, {"t": weight}
    )  # type: ignore[arg-type]
    given_too = onnx.load_model_from_string(stored_models.embedding(weight).data)
    given_too.graph.input.append(helper.make_tensor_value_info("table", TensorProto.FLOAT, weight.shape))
    for artifact in (read, along, Artifact.from_bytes(given_too.SerializeToString())):
        with pytest.raises(Unsupported, match="integers would not make it smaller"):
            store_weights(artifact, StorageOptions(least_weights=512))


def test_a_table_of_a_subgraph_stays() -> None:
    weight = stored_models.table(40, 32)
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Gather", ["t", "ids"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for name in ("then", "else")
    }
    nodes = [helper.make_node("If", ["is"], ["y"], **branches)]
    inputs = {"ids": (TensorProto.INT64, ["N"]), "is": (TensorProto.BOOL, [])}
    with pytest.raises(Unsupported):
        store_weights(stored_models.model(nodes, inputs, {"y": ["N", 32]}, {"t": weight}), SMALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [SMALL, FOUR])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4028235e38])
def test_what_integers_cannot_hold_stays(value: float, options: StorageOptions) -> None:
    weight = stored_models.table(40, 32)
    weight[3, 4] = value
    stored = store_weights(stored_models.embedding(weight), options)
    rows = run(stored, {"ids": np.array([[3]])})["e"]
    if stored.provenance[-1].facts["kept"] == ["table"]:
        np.testing.assert_array_equal(rows[0, 0], weight[3])
    else:
        assert np.isfinite(value)
        assert np.isfinite(rows).all()


def test_a_table_whose_scales_a_few_values_determine_stays() -> None:
    weight = np.full((40, 32), 1e-3, np.float32)
    weight[:, 0] = np.linspace(0.9, 1, 40)
    weight[::2, 1:] = 3e-3
    assert store_weights(stored_models.embedding(weight), SMALL).provenance[-1].facts["kept"] == []
    options = StorageOptions(least_weights=64, max_weight_error=1e-3, tables_only=True)
    with pytest.raises(Unsupported, match="these lose too much: table"):
        store_weights(stored_models.embedding(weight), options)


@pytest.mark.parametrize("tiny", [1e-45, 1e-41, 1e-38])
def test_numbers_below_the_least_normal_one(tiny: float) -> None:
    weight = stored_models.table(40, 32)
    weight[5] = tiny
    for options in (SMALL, FOUR):
        rows = run(store_weights(stored_models.embedding(weight), options), {"ids": np.array([[5]])})["e"]
        assert np.abs(rows - tiny).max() <= np.float32(1.2e-38)


def test_it_follows_other_steps() -> None:
    artifact = stored_models.embedding(stored_models.table(600, 64), outputs=512)
    halved = halve_weights(artifact)
    assert store_tables(halved) is halved
    assert 0.8 < share_of_tables(stored_models.embedding(stored_models.table(1000, 64))) < 1
    assert share_of_tables(networks.mlp(256)) == 0


def test_old_opsets() -> None:
    with pytest.raises(Unsupported):
        store_weights(stored_models.embedding(stored_models.table(), opset=6), SMALL)
