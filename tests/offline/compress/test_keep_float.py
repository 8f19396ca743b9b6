"""Operators that the user names stay in float, whatever the optimiser and the conversions did to them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import penstock
import stored_models
from brief_builds import build
from networks import Network, attention, cnn, images, in_type, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import InvalidArgument
from penstock.offline.build import Recipe
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.fp32.fp32 import optimized_in_fp32
from penstock.offline.compress.keep_float import keep_float
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.recurrent import has_integer_lstm
from penstock.offline.compress.precision.storage import store_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.optimizer import optimize
from penstock.tensor import Array, DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")


def residual(opset: int = 17) -> Artifact:
    """Conv with BatchNormalization, MatMul with a bias, and a Gemm: x (N, 3, 8, 8) to y (N, 4)."""
    n = Network()
    ones = [n.weight(np.full(5, value, np.float32)) for value in (1.5, 0.1, 0.2, 0.9)]
    scaled = n.op("BatchNormalization", n.op("Conv", "x", n.normal(5, 3, 3, 3, fan_in=27), name="c1"), *ones, name="bn")
    flat = n.op("Flatten", n.op("Relu", scaled))
    product = n.op("MatMul", flat, n.normal(180, 6, fan_in=180), name="m1")
    n.gemm(n.op("Relu", n.op("Add", product, n.normal(6), name="a1")), 6, 4, "y")
    for node in n.nodes:
        node.name = f"block/{node.output[0]}"
    return n.artifact({"x": ["N", 3, 8, 8]}, {"y": ["N", 4]}, opset)


def data(seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((32, 3, 8, 8)).astype(np.float32)}


def integers(original: Artifact, *patterns: str) -> list[str]:
    """The operators that become integer."""
    made = keep_float(optimized_in_fp32(optimize(original)[0]), original, patterns)
    return [node.op_type for node in FloatModel(made).integer_nodes(QdqPlacement.LINEAR) if node.op_type != "Relu"]


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16])
@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("block/c1", ["Gemm", "Gemm"]),  # by the operator's name
        ("c1", ["Gemm", "Gemm"]),  # by its result, which is lost when BatchNormalization is folded into it
        ("bn", ["Gemm", "Gemm"]),
        ("m1", ["Conv", "Gemm"]),  # merged with the Add
        ("w6", ["Conv", "Gemm"]),  # the bias of the product
        ("block/*1", ["Gemm"]),
        ("y", ["Conv", "Gemm"]),  # of an FP16 model, a Cast
        ("x", ["Gemm", "Gemm"]),
        ("block/[ab]1", ["Conv", "Gemm"]),
        ("*", []),
    ],
)
def test_names_of_the_original_are_found(opset: int, kind: int, pattern: str, left: list[str]) -> None:
    model = residual(opset)
    assert integers(in_type(model, kind) if kind != TensorProto.FLOAT else model, pattern) == left


def test_without_patterns_nothing_changes() -> None:
    model = residual()
    assert keep_float(model, model, ()) is model
    assert integers(model) == ["Conv", "Gemm", "Gemm"]


@pytest.mark.parametrize("placement", QdqPlacement)
def test_weights_of_kept_operators_stay_fp32_and_the_check_holds(placement: QdqPlacement) -> None:
    original = residual()
    optimized = optimize(original)[0]
    made = keep_float(optimized, original, ["c1"])
    found = ranges(collect(made, data()), RangeMethod.MIN_MAX, SCHEME)
    int8 = quantize(made, found, SCHEME, placement)
    check_explained(original, int8, make_dataset(data(), None))
    model = onnx.load_model_from_string(int8.data)
    kernels = [tensor for tensor in model.graph.initializer if list(tensor.dims) == [5, 3, 3, 3]]
    assert [tensor.data_type for tensor in kernels] == [TensorProto.FLOAT]
    assert "DequantizeLinear" in {node.op_type for node in model.graph.node}


def test_a_pattern_that_matches_nothing_names_near_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"matches 'block/conv\*'") as caught:
        keep_float(residual(), residual(), ["c1", "block/conv*"])
    assert "block/c1" in caught.value.hint
    with pytest.raises(InvalidArgument, match="matches 'é'"):
        keep_float(residual(), residual(), ["é"])


@pytest.mark.parametrize("precision", ["int8-dynamic", "int8-weights", "int4-weights"])
def test_products_stay_float(precision: str) -> None:
    n = Network()
    n.gemm(n.op("Relu", n.gemm("x", 256, 512, "first")), 512, 256, "y")
    model = n.artifact({"x": ["N", 256]}, {"y": ["N", 256]})
    x = {"x": np.random.default_rng(0).standard_normal((20, 256)).astype(np.float32)}
    made = penstock.compress.quantize(model, x, precision=precision, keep_float=("first",)).model
    tensors = onnx.load_model_from_string(made.data).graph.initializer
    floats = [list(one.dims) for one in tensors if one.data_type == TensorProto.FLOAT]
    assert [256, 512] in floats
    assert [512, 256] not in floats


def test_recurrent_layers_and_tables_stay_float() -> None:
    layer = stored_models.recurrent(inputs=32, hidden=32)
    name = onnx.load_model_from_string(layer.data).graph.node[0].output[0]
    assert has_integer_lstm(layer, DynamicOptions())
    marked = keep_float(layer, layer, [name])
    assert not has_integer_lstm(marked, DynamicOptions())
    with pytest.raises(penstock.errors.Unsupported):
        store_weights(marked)


@pytest.mark.parametrize("model", [mlp(), cnn(), attention()])
def test_all_in_float_is_an_error(model: Artifact) -> None:
    rows = {3: np.zeros((20, 5, 32), np.float32), 4: images(20), 2: np.zeros((20, 16), np.float32)}
    rank = len(onnx.load_model_from_string(model.data).graph.input[0].type.tensor_type.shape.dim)
    with pytest.raises(penstock.errors.Unsupported, match="no operator to quantise"):
        penstock.compress.quantize(model, {"x": rows[rank]}, keep_float=["*"])


def test_build_keeps_float(tmp_path: Path) -> None:
    original = residual()
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MSE,), careful=False, timing_s=0.2)
    with pytest.raises(InvalidArgument, match="matches 'nothing'"):
        build(
            original, tmp_path / "m.bundle", data(), data(1), Recipe(keep_float=("nothing",), engines=("onnxruntime",))
        )
    kept = Recipe(**{**{name: getattr(recipe, name) for name in recipe.__struct_fields__}, "keep_float": ("*",)})
    result = build(original, tmp_path / "m.bundle", data(), data(1), kept)
    assert {one.precision for one in result.evidence.candidates} == {"fp32"}
    assert any("no operator to quantise" in note for note in result.evidence.notes)


def test_marks_do_not_change_the_answers() -> None:
    model = residual()
    made = onnx.load_model_from_string(keep_float(model, model, ["*"]).data)
    plain = onnx.load_model_from_string(model.data)
    for node in made.graph.node:
        node.ClearField("doc_string")
    assert made == plain
    assert numpy_helper.to_array(made.graph.initializer[0]).dtype == np.float32
