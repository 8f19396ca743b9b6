"""Placement: what becomes integer and what stays float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import networks
from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.ranges.histogram import Range


def chosen(artifact: Artifact, placement: QdqPlacement) -> list[str]:
    return [node.op_type for node in FloatModel(artifact).integer_nodes(placement)]


def test_linear_takes_weights_and_their_activations() -> None:
    assert chosen(networks.cnn(), QdqPlacement.LINEAR) == ["Conv", "Relu", "Conv", "Relu", "Conv", "Gemm"]


def test_wide_takes_what_lies_between() -> None:
    assert chosen(networks.cnn(), QdqPlacement.WIDE) == [
        *("Conv", "Relu", "Conv", "Relu", "Conv", "Add", "Relu"),
        *("MaxPool", "GlobalAveragePool", "Flatten", "Gemm"),
    ]


def test_attention_scores_stay_float() -> None:
    model = FloatModel(networks.attention())
    linear = {node.output[0] for node in model.integer_nodes(QdqPlacement.LINEAR)}
    wide = {node.output[0] for node in model.integer_nodes(QdqPlacement.WIDE)}
    assert {"q", "k", "v"} <= linear
    assert not {"scores", "mixed", "scaled", "masked"} & linear
    assert {"scores", "mixed"} <= wide
    assert not {"scaled", "masked", "shares"} & wide
    assert {"scores", "scaled", "masked", "y"} <= model.unclippable()
    assert list(model.fixed_ranges()) == ["shares"]


@pytest.mark.parametrize("operator", ["Softmax", "Sigmoid", "Tanh"])
def test_a_range_known_without_data_is_that_of_the_operators_results(operator: str) -> None:
    n = networks.Network()
    n.op(operator, "x", name="y")
    artifact = n.artifact({"x": ["N", 2]}, {"y": ["N", 2]})
    y = OnnxRuntimeEngine().load(artifact, {}).forward({"x": np.float32([[-99, 99], [0, 0], [99, -99]])})["y"]
    assert FloatModel(artifact).fixed_ranges() == {"y": Range(float(y.min()), float(y.max()))}


def test_activations_are_the_float_tensors_but_weights() -> None:
    model = FloatModel(networks.mlp())
    names = model.activations(model.integer_nodes(QdqPlacement.WIDE))
    assert names[0] == "x"
    assert names[-1] == "y"
    assert "hidden" in names
    assert not set(names) & set(model.weights)


@pytest.mark.parametrize(
    ("low", "high", "fits"),
    [
        (0.0, 6.0, True),
        (-1.0, 1.0, True),
        (0.5, 6.0, False),
        (-6.0, 0.0, True),
        (-6.0, -0.5, False),
        (None, 6.0, True),
        (None, -0.5, False),
        (0.5, None, False),
        (0.0, None, True),
    ],
)
def test_clip_that_moves_zero_stays_float(low: float | None, high: float | None, fits: bool) -> None:
    n = networks.Network()
    ends = ["" if end is None else n.weight(np.float32(end)) for end in (low, high)]
    n.op("Clip", n.gemm("x", 16, 8), *ends, name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 8]})
    assert ("Clip" in chosen(artifact, QdqPlacement.LINEAR)) is fits


def test_computed_weights_stay_float() -> None:
    n = networks.Network()
    n.op("Gemm", "x", "b", name="computed")
    n.op("MatMul", "computed", n.normal(8, 4), name="y")
    artifact = n.artifact({"x": ["N", 16], "b": [16, 8]}, {"y": ["N", 4]})
    assert chosen(artifact, QdqPlacement.LINEAR) == ["MatMul"]


def test_an_operator_is_integer_only_after_a_product_and_not_inside_a_variance() -> None:
    n = networks.Network()
    before = n.op("Mul", "x", "x")
    between = n.op("Add", n.op("MatMul", before, n.normal(8, 8)), n.normal(8), name="between")
    inner = n.op("MatMul", n.op("Reshape", between, n.weight(np.array([0, 8]))), n.normal(8, 8), name="inner")
    n.op("Sqrt", n.op("Add", n.op("Mul", inner, inner), n.weight(np.float32(1e-6))), name="y")
    artifact = n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})
    assert chosen(artifact, QdqPlacement.WIDE) == ["MatMul", "Add", "Reshape", "MatMul"]


def test_what_only_float_operators_read_stays_float() -> None:
    n = networks.Network()
    product = n.op("MatMul", "x", n.normal(8, 8), name="product")
    total = n.op("Add", product, "x", name="total")
    n.op("MatMul", n.op("Tanh", total), n.normal(8, 8), name="y")
    shown = n.op("Transpose", n.op("Add", n.op("MatMul", "x", n.normal(8, 8)), "x"), perm=[1, 0], name="shown")
    artifact = n.artifact({"x": ["N", 8]}, {"y": ["N", 8], shown: [8, "N"]})
    assert chosen(artifact, QdqPlacement.WIDE) == ["MatMul", "MatMul", "MatMul"]
    assert chosen(artifact, QdqPlacement.LINEAR) == ["MatMul", "MatMul", "MatMul"]
    n.op("MatMul", total, n.normal(8, 4), name="z")
    artifact = n.artifact({"x": ["N", 8]}, {"y": ["N", 8], "z": ["N", 4]})
    assert chosen(artifact, QdqPlacement.WIDE).count("Add") == 1


def test_nodes_kept_float_do_not_change_the_others() -> None:
    model = FloatModel(networks.cnn())
    nodes = [node.name for node in model.integer_nodes(QdqPlacement.WIDE)]
    left = [node.name for node in model.integer_nodes(QdqPlacement.WIDE, [nodes[-1]])]
    assert left == nodes[:-1]


def test_constant_nodes_count_as_weights() -> None:
    n = networks.Network()
    value = helper.make_tensor("value", 1, [16, 4], np.ones(64, np.float32))
    n.op("MatMul", "x", n.op("Constant", value=value), name="y")
    assert chosen(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), QdqPlacement.LINEAR) == ["MatMul"]


def test_old_opsets_are_converted() -> None:
    assert chosen(networks.mlp(opset=11), QdqPlacement.LINEAR) == ["Gemm", "Relu", "Gemm", "Relu", "Gemm"]


def test_nothing_to_quantise_is_an_empty_list() -> None:
    n = networks.Network()
    n.op("Add", "x", "x", name="y")
    assert chosen(n.artifact({"x": ["N", 2]}, {"y": ["N", 2]}), QdqPlacement.WIDE) == []


def test_a_quantised_model_is_refused() -> None:
    n = networks.Network()
    scale, zero = n.weight(np.float32(0.1)), n.weight(np.uint8(3))
    n.op("DequantizeLinear", n.op("QuantizeLinear", "x", scale, zero), scale, zero, name="y")
    with pytest.raises(Unsupported, match="already quantised"):
        FloatModel(n.artifact({"x": ["N", 2]}, {"y": ["N", 2]}))


def test_a_corrupt_model_is_refused() -> None:
    with pytest.raises(InvalidModel):
        FloatModel(Artifact.from_bytes(b"\x00not a model"))


def test_nodes_without_inputs_stay_as_they_are() -> None:
    n = networks.Network()
    n.op(
        "Gemm", n.op("Add", "x", n.op("RandomNormal", shape=[1, 16])), n.weight(np.ones((16, 8), np.float32)), name="y"
    )
    n.op("Constant", name="version", value=helper.make_tensor("v", TensorProto.FLOAT, [1], [1.0]))
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 8], "version": [1]})
    assert chosen(artifact, QdqPlacement.LINEAR) == ["Gemm"]
    assert chosen(artifact, QdqPlacement.WIDE) == ["Gemm"]


def test_where_shape_inference_fails_unknown_tensors_stay_float(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(proto: onnx.ModelProto) -> onnx.ModelProto:
        raise onnx.shape_inference.InferenceError("cannot")

    n = networks.Network()
    n.gemm(n.op("Relu", n.gemm("x", 16, 8)), 8, 4, name="y")
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 4]})
    assert chosen(artifact, QdqPlacement.LINEAR) == ["Gemm", "Relu", "Gemm"]
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    assert chosen(artifact, QdqPlacement.LINEAR) == []


def test_clip_to_a_computed_bound_stays_float() -> None:
    n = networks.Network()
    n.op("Clip", n.gemm("x", 16, 8), "", n.op("ReduceMax", "x", keepdims=0), name="y")
    assert chosen(n.artifact({"x": ["N", 16]}, {"y": ["N", 8]}), QdqPlacement.WIDE) == ["Gemm"]


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1,), (), None])
def test_a_gemm_with_any_constant_bias_is_integer(shape: tuple[int, ...] | None) -> None:
    n = networks.Network()
    bias = [] if shape is None else [n.weight(np.ones(shape, np.float32))]
    n.op("Gemm", "x", n.normal(16, 8), *bias, name="y")
    assert chosen(n.artifact({"x": ["N", 16]}, {"y": ["N", 8]}), QdqPlacement.LINEAR) == ["Gemm"]


def test_a_convolution_with_a_computed_bias_stays_float() -> None:
    n = networks.Network()
    n.op("Conv", "x", n.normal(4, 3, 1, 1), "b", name="y")
    assert chosen(n.artifact({"x": ["N", 3, 8, 8], "b": [4]}, {"y": ["N", 4, 8, 8]}), QdqPlacement.WIDE) == []


@pytest.mark.parametrize(("shape", "fits"), [((8, 4), True), ((3, 8, 4), False)])
def test_a_matrix_has_two_axes(shape: tuple[int, ...], fits: bool) -> None:
    n = networks.Network()
    n.op("MatMul", "x", n.normal(*shape), name="y")
    assert bool(chosen(n.artifact({"x": [3, 5, 8]}, {"y": [3, 5, 4]}), QdqPlacement.LINEAR)) is fits


def test_a_product_with_constants_first_stays_float() -> None:
    n = networks.Network()
    n.op("MatMul", n.normal(4, 8), "x", name="y")
    for placement in QdqPlacement:
        assert chosen(n.artifact({"x": [8, 5]}, {"y": [4, 5]}), placement) == []


def test_a_product_of_two_activations_is_integer_only_in_the_wide_placement() -> None:
    n = networks.Network()
    n.op("MatMul", "x", "z", name="y")
    artifact = n.artifact({"x": ["N", 8], "z": [8, 5]}, {"y": ["N", 5]})
    assert chosen(artifact, QdqPlacement.WIDE) == ["MatMul"]
    assert chosen(artifact, QdqPlacement.LINEAR) == []


def test_unknown_nodes_cannot_be_kept_float() -> None:
    with pytest.raises(InvalidArgument, match=r"no node of the model is called \['Conv_99'\]"):
        FloatModel(networks.cnn()).integer_nodes(QdqPlacement.WIDE, ["Conv_99", "Conv_0"])


@pytest.mark.parametrize(("opset", "converted"), [(12, 14), (13, 13), (17, 17)])
def test_models_before_opset_13_are_converted_to_14(opset: int, converted: int) -> None:
    assert FloatModel(networks.mlp(opset=opset)).proto.opset_import[0].version == converted


def test_overridable_weights_are_inputs() -> None:
    n = networks.Network()
    weight = n.normal(16, 8)
    n.op("MatMul", "x", weight, name="y")
    model = FloatModel(n.artifact({"x": ["N", 16], weight: [16, 8]}, {"y": ["N", 8]}))
    assert model.weights == {}
    assert model.input_names == ["x"]
    assert model.integer_nodes(QdqPlacement.LINEAR) == []


def test_readers_count_nodes_branches_and_outputs() -> None:
    n = networks.Network()
    a = n.op("Relu", "x", name="a")
    n.op("Add", a, n.op("Neg", a), name="y")
    model = FloatModel(n.artifact({"x": ["N", 2]}, {"y": ["N", 2], "a": ["N", 2]}))
    assert (model.readers["x"], model.readers["a"], model.readers["y"]) == (1, 3, 1)


def test_a_variance_without_a_square_stays_float_up_to_its_start() -> None:
    n = networks.Network()
    inner = n.op("MatMul", "x", n.normal(8, 8))
    shifted = n.op("Add", n.op("Mul", inner, "x"), n.weight(np.float32(9)))
    n.op("MatMul", n.op("Log", shifted), n.normal(8, 8), name="y")
    assert chosen(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}), QdqPlacement.WIDE) == ["MatMul", "MatMul"]
