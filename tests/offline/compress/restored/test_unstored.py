"""A fault in the storage of a weight is found; correct storage without its rounding is the original."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

import stored_models
from networks import attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import WrongResult
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.dynamic import quantize_dynamic
from penstock.offline.compress.precision.storage import StorageOptions, store_weights
from penstock.offline.compress.restored.restore import restored
from penstock.offline.compress.restored.unstored import unstored
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from tests.faults import edited

NORMAL = np.random.default_rng(0)
MODELS: dict[str, tuple[Artifact, Dataset]] = {
    "table": (
        stored_models.embedding(stored_models.table(60, 32)),
        make_dataset({"ids": NORMAL.integers(0, 60, (32, 5))}, None),
    ),
    "cnn": (cnn(8), make_dataset({"x": images(32)}, None)),
    "mlp": (mlp(32), make_dataset({"x": NORMAL.standard_normal((32, 16)).astype(np.float32)}, None)),
    "attention": (attention(16), make_dataset({"x": NORMAL.standard_normal((32, 5, 16)).astype(np.float32)}, None)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_without_its_rounding_it_is_the_original(name: str, bits: int) -> None:
    artifact, data = MODELS[name]
    made = store_weights(artifact, StorageOptions(table_bits=bits, least_weights=64))
    found = [one for one in check_explained(artifact, made, data) if one.reason.startswith("without its own change")]
    assert found
    assert max(one.error for one in found) < 1e-4


def of_type(proto: onnx.ModelProto, *types: int) -> onnx.TensorProto:
    return next(tensor for tensor in proto.graph.initializer if tensor.data_type in types)


def _wrong_integer(proto: onnx.ModelProto) -> None:
    tensor = of_type(proto, TensorProto.INT8, TensorProto.UINT8)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[-1] ^= 8
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _wrong_scale(proto: onnx.ModelProto) -> None:
    tensor = next(one for one in proto.graph.initializer if one.name.endswith("_scale"))
    array = numpy_helper.to_array(tensor).copy()
    array.flat[-1] *= 1.1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _coarse_steps(proto: onnx.ModelProto) -> None:
    integers, scale = (
        of_type(proto, TensorProto.INT8),
        next(one for one in proto.graph.initializer if one.name.endswith("_scale")),
    )
    array = numpy_helper.to_array(integers)
    integers.CopyFrom(numpy_helper.from_array(np.rint(array / 4).astype(np.int8), integers.name))
    scale.CopyFrom(numpy_helper.from_array(4 * numpy_helper.to_array(scale), scale.name))


def _halves_swapped(proto: onnx.ModelProto) -> None:
    node = next(node for node in proto.graph.node if node.op_type == "Concat")
    first, second = node.input
    node.input[:] = [second, first]


def _no_offset(proto: onnx.ModelProto) -> None:
    tensor = next(one for one in proto.graph.initializer if one.name == "constant_8")
    tensor.CopyFrom(numpy_helper.from_array(np.array(7, np.float32), tensor.name))


def _wrong_factor(proto: onnx.ModelProto) -> None:
    node = next(node for node in proto.graph.node if node.op_type == "Mul" and node.input[1].endswith("_scale"))
    node.op_type = "Div"


def _other_ids(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.array([[1]]), "one"))
    node = [node for node in proto.graph.node if node.op_type == "Gather"][-1]
    node.input[1] = "one"


@pytest.mark.parametrize(
    ("bits", "fault"),
    [
        *((bits, fault) for bits in (4, 8) for fault in (_wrong_integer, _wrong_scale, _wrong_factor, _other_ids)),
        (8, _coarse_steps),
        (4, _halves_swapped),
        (4, _no_offset),
    ],
)  # fmt: skip
def test_a_fault_in_a_table_is_found(bits: int, fault: Callable[[onnx.ModelProto], None]) -> None:
    artifact, data = MODELS["table"]
    made = store_weights(artifact, StorageOptions(table_bits=bits, least_weights=512))  # type: ignore[arg-type]
    with pytest.raises(WrongResult):
        check_explained(artifact, edited(made, fault), data)


@pytest.mark.parametrize("fault", [_wrong_integer, _wrong_scale, _wrong_factor, _coarse_steps])
@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_a_fault_in_a_layer_is_found(name: str, fault: Callable[[onnx.ModelProto], None]) -> None:
    artifact, data = MODELS[name]
    made = store_weights(artifact, StorageOptions(least_weights=64))
    with pytest.raises(WrongResult):
        check_explained(artifact, edited(made, fault), data)


@given(
    rows=st.integers(1, 30),
    width=st.sampled_from([16, 24, 32, 50]),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_restored_tables_are_exact(rows, width, bits, seed):
    weight = stored_models.table(rows, width, seed, padding=seed % rows)
    weight[-1] *= 1e-42  # below the least normal number
    artifact = stored_models.embedding(weight, rank=1)
    made = store_weights(artifact, StorageOptions(table_bits=bits, least_weights=1))
    layers = made.provenance[-1].facts["layers"]
    if "table" not in layers:
        assert made.provenance[-1].facts["kept"] == ["table"]
        return
    found = unstored(read_proto(made), artifact, layers)
    exact = {tensor.name: numpy_helper.to_array(tensor) for tensor in found.graph.initializer}
    (rows_found,) = (array for name, array in exact.items() if name == f"{layers['table']['restored'][0]}_exact")
    np.testing.assert_array_equal(rows_found.reshape(weight.shape), weight)


def test_rounded_activations_do_not_hide_or_fake_an_error() -> None:
    """A last bit of the table decides about roundings of activations, so the undone model has exactly the original numbers."""
    artifact = stored_models.embedding(stored_models.table(600, 64), outputs=256)
    data = make_dataset({"ids": NORMAL.integers(0, 600, (32, 16))}, None)
    int8 = quantize_dynamic(artifact, data)
    made = store_weights(int8, StorageOptions(tables_only=True))
    found = restored("store_weights", made, int8)
    with loaded(found.found, as_written=True) as one, loaded(found.wanted, as_written=True) as other:
        np.testing.assert_array_equal(one.forward(data.inputs)["y"], other.forward(data.inputs)["y"])
    check_explained(artifact, made, data)
