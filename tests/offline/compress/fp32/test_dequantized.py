# ruff: noqa: E501 - a model is easier to read in one line
"""A dequantised model is nearer to the float model than the quantised one, and has no integer operator left."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import PenstockError, Unsupported
from penstock.offline.compress.fp32.dequantized import dequantized
from penstock.offline.compress.fp32.fp32 import optimized_in_fp32
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.sessions import loaded, signature_of
from penstock.tensor import Array, DataType
from tests import random_models
from tests.random_models import RandomModel, make_genes
from tests.row_graphs import parsed

RNG = np.random.default_rng(0)
NETWORKS: dict[str, tuple[Artifact, Array]] = {
    "cnn": (cnn(8), images(32)),
    "mlp": (mlp(32), RNG.standard_normal((32, 16)).astype(np.float32)),
    "attention": (attention(16), RNG.standard_normal((32, 5, 16)).astype(np.float32)),
}
SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
INTEGERS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM"}  # fmt: skip


class Rows(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, x: Array) -> None:
        self._rows: Iterator[dict[str, Array]] = iter([{"x": row[None]} for row in x])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._rows, None)


def run(artifact: Artifact, x: Array, **more: Array) -> Array:
    with loaded(artifact, as_written=True) as model:
        return next(iter(model.forward({"x": x, **more}).values())).astype(np.float64)


def error(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def operators(artifact: Artifact) -> set[str]:
    return {node.op_type for node in onnx.load_model_from_string(artifact.data).graph.node}


def check(quantised: Artifact, network: Artifact, x: Array) -> Artifact:
    made = optimized_in_fp32(quantised)
    found = operators(made)
    assert found.isdisjoint(INTEGERS)
    assert not any(name.startswith(("QLinear", "QGemm")) for name in found)
    assert signature_of(made).input_names == signature_of(quantised).input_names
    float_, rounded, back = (run(model, x) for model in (network, quantised, made))
    assert error(back, float_) <= 1.2 * error(rounded, float_) + 1e-3
    assert error(back, rounded) <= 1.2 * error(rounded, float_) + 5e-3
    assert FloatModel(made).integer_nodes(QdqPlacement.LINEAR)
    return made


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator])
@pytest.mark.parametrize("activation", [QuantType.QUInt8, QuantType.QInt8])
def test_static_quantisation_is_undone(
    name: str, per_channel: bool, form: QuantFormat, activation: QuantType, tmp_path: Path
) -> None:
    network, x = NETWORKS[name]
    (tmp_path / "float.onnx").write_bytes(network.data)
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "int8.onnx",
        Rows(x),
        quant_format=form,
        per_channel=per_channel,
        activation_type=activation,
        weight_type=QuantType.QInt8,
    )
    made = check(Artifact.from_file(tmp_path / "int8.onnx"), network, x)
    if name != "attention":
        assert "Clip" in operators(made)  # in place of the Relus that the quantiser fused


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("weight", [QuantType.QUInt8, QuantType.QInt8])
def test_dynamic_quantisation_is_undone(name: str, weight: QuantType, tmp_path: Path) -> None:
    network, x = NETWORKS[name]
    (tmp_path / "float.onnx").write_bytes(network.data)
    for per_channel in (False, True):
        quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=weight, per_channel=per_channel)
        check(Artifact.from_file(tmp_path / "int8.onnx"), network, x)


def int8(model: Artifact, x: dict[str, Array], placement: QdqPlacement) -> Artifact:
    found = ranges(collect(model, make_dataset(x, None)), RangeMethod.MIN_MAX, SCHEME)
    return quantize(model, found, SCHEME, placement)


@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("name", NETWORKS)
def test_our_own_quantisation_is_undone(name: str, placement: QdqPlacement) -> None:
    network, x = NETWORKS[name]
    made = check(int8(network, {"x": x}, placement), network, x)
    again = int8(made, {"x": x}, placement)
    assert error(run(again, x), run(network, x)) < 0.05
    assert "Clip" not in operators(again)  # the ranges absorb them again


def test_a_relu6_that_a_range_replaces_is_kept() -> None:
    n = Network()
    n.op("Clip", n.gemm("x", 4, 8), n.weight(np.float32(0)), n.weight(np.float32(6)), name="y6")
    model = n.gemm("y6", 8, 4, name="y") and n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})
    x = RNG.standard_normal((64, 4)).astype(np.float32) * 8
    made = check(int8(model, {"x": x}, QdqPlacement.LINEAR), model, x)
    assert error(run(made, x * 5), run(model, x * 5)) < 0.05


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_random_models_come_back(seed: int) -> None:
    try:
        with patch.object(random_models, "_FLOATS", (np.float32,)):
            random = RandomModel(make_genes(seed))
            model = random.artifact()
    except onnx.checker.ValidationError:  # ONNX Runtime takes operators of later opsets
        reject()
    if "Clip" in operators(model):
        reject()  # a range that replaces a Clip from below 0 cannot be told from another range
    names = signature_of(model).input_names
    count = random.fixed_rows or 8
    x = dict(zip(names, random.rows(count).values(), strict=True))
    try:
        quantised = int8(model, x, QdqPlacement.WIDE)
    except Unsupported:
        return
    made = dequantized(quantised)
    assert made is not quantised
    for rows in (count, *([] if random.fixed_rows else [1])):
        part = {name: array[:rows] for name, array in x.items()}
        with loaded(model, as_written=True) as one, loaded(quantised, as_written=True) as two, loaded(made) as three:
            for want, rounded, back in zip(*(m.forward(part).values() for m in (one, two, three)), strict=True):
                assert back.dtype == want.dtype
                assert back.shape == want.shape
                if want.dtype.kind == "f":
                    norm = max(float(np.linalg.norm(want)), 1e-3)
                    far = float(np.linalg.norm(rounded - want))
                    assert float(np.linalg.norm(back - want)) <= 1.5 * far + 0.05 * norm


LINES = "float s = {0.5}, float r = {0.25}, uint8 z = {3}, int8[4,2] w = {1,2,3,-4,5,6,-7,8}, float[2] ws = {0.5,0.25}, int8[2] wz = {0,0}"


def test_integers_of_the_caller_stay() -> None:
    model = parsed(
        "a = DequantizeLinear(x, s, z) b = DequantizeLinear<axis=1>(w, ws, wz) c = MatMul(a, b) y = QuantizeLinear(c, s, z)",
        "uint8[N,4] x",
        "uint8[N,2] y",
        LINES,
    )
    made = dequantized(model)
    assert signature_of(made) == signature_of(model)
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(run(made, x), run(model, x))
    assert FloatModel(made).integer_nodes(QdqPlacement.LINEAR)


def test_different_parameters_are_not_undone() -> None:
    model = parsed("q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, r, z)", "float[N,4] x", "float[N,4] y", LINES)
    assert dequantized(model) is model
    with pytest.raises(Unsupported, match="tensor 'y' cannot be dequantised"):
        FloatModel(model)


def test_models_that_are_not_quantised_are_returned_as_they_are() -> None:
    model = mlp()
    assert dequantized(model) is model


def test_integers_that_others_read_stay() -> None:
    """The model shows the integers of a tensor, and their numbers."""
    model = parsed(
        "q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) y = Relu(a) m = Identity(q)",
        "float[N,4] x",
        "float[N,4] y, uint8[N,4] m",
        LINES,
    )
    made = dequantized(model)
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    with loaded(model) as one, loaded(made) as two:
        want, got = one.forward({"x": x}), two.forward({"x": x})
    np.testing.assert_array_equal(got["m"], want["m"])
    np.testing.assert_allclose(got["y"], np.maximum(x, 0), atol=1e-6)


@pytest.mark.parametrize("zero", [0, 3])
def test_biases_that_are_rounded_at_run_time(zero: int) -> None:
    """Converters of earlier years divide the bias by the scale of the product, and add its integers."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-100, 100, (5, 3, 2, 2)).astype(np.int8)
    bias = rng.standard_normal(5).astype(np.float32)
    n = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("ConvInteger", ["q", "w", "z", "wz"], ["i"], pads=[1, 1, 0, 0]),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Div", ["b", "t"], ["d"]),
        helper.make_node("Floor", ["d"], ["f"]),
        helper.make_node("Cast", ["f"], ["k"], to=TensorProto.INT32),
        helper.make_node("Reshape", ["k", "shape"], ["l"]),
        helper.make_node("Add", ["i", "l"], ["j"]),
        helper.make_node("Cast", ["j"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "t"], ["y"]),
    ]
    tensors = {"w": weight, "wz": np.int8(zero), "ws": np.float32(0.01), "b": bias, "shape": np.array([1, 5, 1, 1])}
    graph = helper.make_graph(
        n,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 5, 6, 6])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    artifact = Artifact.from_bytes(model.SerializeToString())
    made = dequantized(artifact)
    assert operators(made) == {"Conv"}
    x = rng.standard_normal((2, 3, 6, 6)).astype(np.float32)
    assert error(run(made, x), run(artifact, x)) < 0.02


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_dynamic_lstm(direction: str, tmp_path: Path) -> None:
    count = 2 if direction == "bidirectional" else 1
    n = Network()
    weights = n.normal(count, 32, 4, fan_in=4), n.normal(count, 32, 8, fan_in=8), n.normal(count, 64, fan_in=4)
    n.op("LSTM", "x", *weights, name="y", hidden_size=8, direction=direction)
    network = n.artifact({"x": ["T", "N", 4]}, {"y": ["T", count, "N", 8]})
    (tmp_path / "float.onnx").write_bytes(network.data)
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", per_channel=True)
    quantised = Artifact.from_file(tmp_path / "int8.onnx")
    assert "DynamicQuantizeLSTM" in operators(quantised)
    made = dequantized(quantised)
    assert operators(made) == {"LSTM"}
    x = RNG.standard_normal((7, 3, 4)).astype(np.float32)
    assert error(run(made, x), run(network, x)) <= 1.2 * error(run(quantised, x), run(network, x)) + 1e-3


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_and_four_bits(axis: int) -> None:
    rng = np.random.default_rng(0)
    shape = [8, 6]
    shape[axis] //= 2
    tensors = [
        helper.make_tensor("w", TensorProto.INT4, [8, 6], rng.integers(-8, 8, 48)),
        numpy_helper.from_array(rng.random(shape).astype(np.float32), "s"),
        numpy_helper.from_array(np.float32([0.1]), "one"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=axis, block_size=2),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 8), ("y", 6)))
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    artifact = Artifact.from_bytes(model.SerializeToString())
    values = rng.standard_normal((3, 8)).astype(np.float32)
    np.testing.assert_allclose(run(dequantized(artifact), values), run(artifact, values), rtol=1e-5, atol=1e-5)
    with pytest.raises(PenstockError, match="already quantised"):
        FloatModel(artifact)
