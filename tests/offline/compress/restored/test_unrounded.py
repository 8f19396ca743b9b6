"""Every defect below changes a single number or connection of a model whose error stays far below that of rounding."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import WrongResult
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.restored.unrounded import unrounded, with_float_products
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

SCHEMES = [
    IntegerScheme(DataType.UINT8, DataType.INT8, True, "test"),
    IntegerScheme(DataType.INT8, DataType.INT8, False, "test"),
]
NETWORKS: dict[str, tuple[Artifact, Dataset]] = {
    "cnn": (cnn(8), make_dataset({"x": images(16)}, None)),
    "mlp": (mlp(32), make_dataset({"x": np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)}, None)),
    "attention": (
        attention(16),
        make_dataset({"x": np.random.default_rng(0).standard_normal((16, 5, 16)).astype(np.float32)}, None),
    ),
}
WEIGHTS: dict[str, Callable[[Artifact], Artifact]] = {
    "dynamic": lambda a: quantize_dynamic(a, NETWORKS["mlp"][1], DynamicOptions(least_weights=1)),
    "int8": lambda a: quantize_weights(a, None, WeightOnlyOptions(8, 16, least_weights=1)),
    "int4": lambda a: quantize_weights(a, None, WeightOnlyOptions(4, 16, least_weights=1)),
    "int4-search": lambda a: quantize_weights(a, None, WeightOnlyOptions(4, 16, search=True, least_weights=1)),
    "fp16": lambda a: halve_weights(a, HalfOptions("fp16", least_weights=1)),
    "bf16": lambda a: halve_weights(a, HalfOptions("bf16", least_weights=1)),
}


def int8(name: str, placement=QdqPlacement.LINEAR, scheme=SCHEMES[0]) -> Artifact:
    artifact, data = NETWORKS[name]
    return quantize(artifact, ranges(collect(artifact, data), RangeMethod.MIN_MAX, scheme), scheme, placement)


def proto(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load_model_from_string(artifact.data)


def run(model: onnx.ModelProto, name: str) -> np.ndarray:
    with loaded(Artifact.from_bytes(model.SerializeToString()), as_written=True) as running:
        return running.forward(dict(NETWORKS[name][1].inputs))["y"]


def tensor_of(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def put(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    tensor_of(model, name).CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_int8_without_rounding_gives_the_answers_of_the_original(name, placement, scheme):
    made, original = proto(int8(name, placement, scheme)), NETWORKS[name][0]
    found = unrounded(made, original)
    assert not {node.op_type for node in found.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    want = run(proto(original), name)
    np.testing.assert_allclose(run(found, name), want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("method", WEIGHTS)
def test_weights_of_any_type_are_put_back(method):
    original = NETWORKS["mlp"][0]
    want = run(proto(original), "mlp")
    found = run(unrounded(proto(WEIGHTS[method](original)), original), "mlp")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def _off_by_one(array: np.ndarray, place: int) -> np.ndarray:
    """``array`` with the number at ``place`` moved to its neighbour."""
    flat = np.array(array).reshape(-1)
    if array.dtype.itemsize == 2:
        flat.view(np.uint16)[place] += 1
    else:
        flat[place] += np.where(flat[place] == np.iinfo(array.dtype).max, -1, 1).astype(array.dtype)
    return flat.reshape(array.shape)


@pytest.mark.parametrize("method", ["linear", *WEIGHTS])
def test_an_integer_that_is_off_by_one_is_found(method):
    original = NETWORKS["mlp"][0]
    made = proto(int8("mlp") if method == "linear" else WEIGHTS[method](original))
    names = [
        tensor.name
        for tensor in made.graph.initializer
        if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64) and len(tensor.dims) > 1
    ]
    assert len(names) == 3
    rng = np.random.default_rng(0)
    for name in names:
        array = numpy_helper.to_array(tensor_of(made, name))
        # A scale by search leaves some of the integers at a limit, where any larger weight rounds to.
        is_inner = (array != array.max()) & (array != array.min())
        inner = np.flatnonzero(is_inner) if array.dtype.itemsize == 1 else np.arange(array.size)
        for place in rng.choice(inner, 5):
            wrong = proto(Artifact.from_bytes(made.SerializeToString()))
            put(wrong, name, _off_by_one(array, place))
            with pytest.raises(WrongResult, match="is no rounded weight of the original"):
                unrounded(wrong, original)


def test_a_bias_that_is_off_by_a_step_is_found():
    made = proto(int8("cnn"))
    biases = [tensor for tensor in made.graph.initializer if tensor.data_type == onnx.TensorProto.INT32]
    put(made, biases[0].name, numpy_helper.to_array(biases[0]) + np.int32(1))
    with pytest.raises(WrongResult, match=f"weight '{biases[0].name}' .* is no rounded weight"):
        unrounded(made, NETWORKS["cnn"][0])


@pytest.mark.parametrize("place", [1, 2])
def test_another_scale_or_zero_point_than_that_of_rounding_is_found(place):
    made = proto(int8("mlp"))
    weights = {tensor.name for tensor in made.graph.initializer}
    node = next(one for one in made.graph.node if one.op_type == "DequantizeLinear" and one.input[0] not in weights)
    other = numpy_helper.to_array(tensor_of(made, node.input[place]))
    other = np.asarray(other + (1 if place == 2 else 1e-6), other.dtype)
    made.graph.initializer.append(numpy_helper.from_array(other, "other"))
    node.input[place] = "other"
    with pytest.raises(WrongResult, match="is quantised and dequantised differently"):
        unrounded(made, NETWORKS["mlp"][0])


def test_a_range_that_does_not_replace_its_relu_is_found():
    made = proto(int8("cnn"))
    zeros = [one for one in made.graph.initializer if one.name.endswith("_zero_point") and not len(one.dims)]
    absorbed = [one for one in zeros if one.data_type == onnx.TensorProto.UINT8 and not numpy_helper.to_array(one)]
    assert absorbed
    put(made, absorbed[0].name, np.array(1, np.uint8))
    with pytest.raises(WrongResult, match="exceeds the bounds of Relu"):
        unrounded(made, NETWORKS["cnn"][0])


def test_a_connection_remains_in_the_result():
    """A lost bias is not found here but changes the answers."""
    made, original = proto(int8("cnn")), NETWORKS["cnn"][0]
    node = next(one for one in made.graph.node if one.op_type == "Conv")
    del node.input[2:]
    want = run(proto(original), "cnn")
    assert np.abs(run(unrounded(made, original), "cnn") - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_of_the_original_stay(dtype):
    n = Network()
    x = n.op("MatMul", "x", n.op("Cast", n.weight(np.full((16, 16), 0.5).astype(dtype)), to=1))
    n.op("MatMul", x, n.normal(16, 16), name="y")
    original = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    found = unrounded(proto(halve_weights(original, HalfOptions("fp16", least_weights=1))), original)
    assert [node.op_type for node in found.graph.node] == ["Cast", "MatMul", "MatMul"]


def test_of_constants_that_were_clipped_the_nearest_is_put_back():
    """A constant that is quantised like an activation fills its range, so any larger one would be clipped to its integers."""
    n = Network()
    x = n.op("MatMul", "x", n.normal(8, 8))
    x = n.op("Mul", n.op("Add", x, n.weight(np.float32(30))), n.weight(np.float32(3)))
    n.op("MatMul", x, n.normal(8, 8), name="y")
    original = n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)}, None)
    found = ranges(collect(original, data), RangeMethod.MIN_MAX, SCHEMES[0])
    made = unrounded(proto(quantize(original, found, SCHEMES[0], QdqPlacement.WIDE)), original)
    scalars = [numpy_helper.to_array(one) for one in made.graph.initializer if not len(one.dims)]
    assert scalars == [30, 3]


def test_products_with_blocks_are_made_float_to_be_compared():
    made = WEIGHTS["int8"](NETWORKS["mlp"][0])
    nodes = [node for node in proto(with_float_products(made)).graph.node if node.op_type == "MatMulNBits"]
    assert [one.i for node in nodes for one in node.attribute if one.name == "accuracy_level"] == [1, 1, 1]
    assert with_float_products(NETWORKS["mlp"][0]) is NETWORKS["mlp"][0]
