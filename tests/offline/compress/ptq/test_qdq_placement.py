"""Placement: what becomes integer and what stays float."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import networks
from networks import Network
from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.ranges.histogram import Range


def chosen(artifact: Artifact, placement: QdqPlacement) -> list[str]:
    return [node.op_type for node in FloatModel(artifact).integer_nodes(placement)]


def integer(artifact: Artifact, placement: QdqPlacement = QdqPlacement.WIDE) -> set[str]:
    """The results of the integer operators."""
    return {name for node in FloatModel(artifact).integer_nodes(placement) for name in node.output}


class Observed(Network):
    """A network of 8 features in which a product reads each tensor with a name, so that only the rules 2 and 4 keep it float."""

    def op(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        made = super().op(operator, *inputs, name=name, **attributes)
        if name:
            super().op("MatMul", made, self.normal(8, 8), name=f"{name}_read")
        return made

    def integer(self, *names: str) -> set[str]:
        """Those of the tensors ``names`` that integer operators make in the wide placement."""
        reads = {node.output[0]: ["N", 8] for node in self.nodes if node.output[0].endswith("_read")}
        return integer(self.artifact({"x": ["N", 8]}, reads)) & set(names)


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
    assert model.unclippable() == {"scores", "scaled", "masked", "y"}
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
        (None, None, True),
    ],
)
def test_clip_that_moves_zero_stays_float(low: float | None, high: float | None, fits: bool) -> None:
    n = networks.Network()
    ends = ["" if end is None else n.weight(np.float32(end)) for end in (low, high)]
    n.op("Clip", n.gemm("x", 16, 8), *ends, name="y")
    while ends and not ends[-1]:
        ends.pop()
    n.op("Clip", n.gemm("x", 16, 8), *ends, name="z")  # without the empty names
    artifact = n.artifact({"x": ["N", 16]}, {"y": ["N", 8], "z": ["N", 8]})
    assert chosen(artifact, QdqPlacement.LINEAR).count("Clip") == 2 * fits


def test_computed_weights_stay_float() -> None:
    n = networks.Network()
    n.op("Gemm", "x", "b", name="computed")
    n.op("MatMul", "computed", n.normal(8, 4), name="y")
    artifact = n.artifact({"x": ["N", 16], "b": [16, 8]}, {"y": ["N", 4]})
    for placement in QdqPlacement:
        assert chosen(artifact, placement) == ["MatMul"]


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
    n.op("DequantizeLinear", n.op("QuantizeLinear", n.op("Relu", "x"), scale, zero), scale, zero, name="y")
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
    assert "version" not in FloatModel(artifact).weights  # a constant output is no weight


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
    n.op("Conv", "x", n.normal(4, 3, 1, 1), "", name="z")
    artifact = n.artifact({"x": ["N", 3, 8, 8], "b": [4]}, {"y": ["N", 4, 8, 8], "z": ["N", 4, 8, 8]})
    assert integer(artifact) == {"z"}


@pytest.mark.parametrize(("shape", "fits"), [((8, 4), True), ((3, 8, 4), True), ((3, 8, 1), False), ((8,), False)])
def test_a_weight_is_a_matrix_or_a_stack_of_matrices(shape: tuple[int, ...], fits: bool) -> None:
    n = networks.Network()
    n.op("MatMul", "x", n.normal(*shape), name="y")
    dims = [3, 5, *shape[-1:]] if len(shape) > 1 else [3, 5]
    assert bool(chosen(n.artifact({"x": [3, 5, 8]}, {"y": dims}), QdqPlacement.LINEAR)) is fits


def test_a_constant_on_the_left_is_turned_to_the_right() -> None:
    n = networks.Network()
    n.op("MatMul", n.normal(4, 8), "x", name="y")
    n.op("MatMul", n.normal(4, 8), n.normal(8, 5), name="z")
    for placement in QdqPlacement:
        assert chosen(n.artifact({"x": [8, 5]}, {"y": [4, 5], "z": [4, 5]}), placement) == ["MatMul"]


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


def test_from_a_square_over_its_root_to_the_product_with_the_root_all_stays_float() -> None:
    n = Observed()
    product = n.op("MatMul", "x", n.normal(8, 8))
    before = n.op("Add", product, n.normal(8), name="before")
    square = n.op("Mul", before, before, name="square")
    shifted = n.op("Add", square, n.weight(np.float32(1e-6)), name="shifted")
    root = n.op("Sqrt", shifted, name="root")
    inverse = n.op("Div", n.weight(np.float32(1)), root)
    normal = n.op("Mul", before, inverse, name="normal")
    n.op("Add", normal, product, name="after")
    n.op("Mul", before, product, name="other")
    n.op("Add", product, inverse, name="sum")
    assert n.integer("before", "square", "shifted", "normal", "after", "other", "sum") == {
        *("before", "after", "other", "sum")
    }


@pytest.mark.parametrize("way", ["Sqrt, Reciprocal", "Reciprocal, Sqrt"])
def test_a_reciprocal_of_a_root_is_a_root(way: str) -> None:
    n = Observed()
    product = n.op("MatMul", "x", n.normal(8, 8))
    first, second = way.split(", ")
    n.op("Mul", product, n.op(second, n.op(first, n.op("Mul", product, product))), name="normal")
    n.op("Mul", product, n.op("Reciprocal", n.op("Abs", product)), name="ratio")
    assert n.integer("normal", "ratio") == {"ratio"}


def test_after_the_division_by_a_root_products_are_integer() -> None:
    n = Observed()
    product = n.op("MatMul", "x", n.normal(8, 8))
    root = n.op("Sqrt", n.op("Mul", product, product))
    n.op("Mul", n.op("Div", product, root), product, name="scaled")
    assert n.integer("scaled") == {"scaled"}


def test_what_a_root_reads_stays_float_up_to_a_square_or_another_operator() -> None:
    n = Observed()
    product = n.op("MatMul", "x", n.normal(8, 8))
    start = n.op("Add", product, n.normal(8), name="start")
    turned = n.op("Reshape", start, n.weight(np.array([-1, 8])), name="turned")
    first = n.op("Add", turned, n.normal(8), name="first")
    twice = n.op("Add", first, first, name="twice")
    other = n.op("Mul", twice, product, name="other")
    n.op("Log", other)
    assert n.integer("start", "turned", "first", "twice", "other") == {"start", "turned"}


def test_scores_stay_float_although_a_product_reads_them() -> None:
    n = Observed()
    product = n.op("MatMul", "x", n.normal(8, 8))
    before = n.op("Pad", product, n.weight(np.array([0, 0, 0, 0])), name="before")
    scaled = n.op("Mul", before, n.weight(np.float32(3)), name="scaled")
    n.op("Softmax", n.op("Softmax", scaled))
    assert n.integer("before", "scaled") == {"before"}


@pytest.mark.parametrize("last", ["Softmax", "Sqrt"])
def test_each_tensor_before_a_softmax_or_a_root_is_visited_once(last: str) -> None:
    n = networks.Network()
    x = n.op("MatMul", "x", n.normal(8, 8))
    for _ in range(40):
        x = n.op("Add", x, x)
    n.op(last, x, name="y")
    assert chosen(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}), QdqPlacement.WIDE) == ["MatMul"]


def test_an_input_of_a_softmax_is_not_clipped() -> None:
    n = networks.Network()
    n.op("Softmax", "x", name="y")
    assert FloatModel(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})).unclippable() == {"x", "y"}


def test_an_activation_after_a_float_operator_stays_float() -> None:
    n = networks.Network()
    product = n.op("MatMul", n.op("Relu", "x", name="first"), n.normal(8, 8), name="product")
    n.op("Tanh", n.op("Relu", n.op("Add", product, "x"), name="sum"), name="y")
    n.op("MatMul", n.op("Relu", n.op("Tanh", product), name="bent"), n.normal(8, 8), name="z")
    artifact = n.artifact({"x": ["N", 8]}, {"y": ["N", 8], "z": ["N", 8]})
    assert integer(artifact) == {"product", "z"}


def test_only_the_types_fp32_and_operators_of_onnx_are_integer() -> None:
    n = networks.Network()
    wide = n.op("MatMul", n.op("Cast", "x", to=TensorProto.DOUBLE), n.weight(np.ones((8, 8))))
    n.op("Cast", wide, to=TensorProto.FLOAT, name="y")
    assert integer(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})) == set()


def test_operators_of_other_domains_stay_float() -> None:
    n = networks.Network()
    product = n.op("MatMul", "x", n.normal(8, 8), name="product")
    n.op("Pad", product, n.weight(np.array([0, 0, 0, 0])), name="padded")
    n.op("MatMul", "padded", n.normal(8, 8), name="y")
    n.op("MatMul", "x", n.op("Identity", "z", name="unknown"), name="w")
    model = onnx.load_model_from_string(
        n.artifact({"x": [8, 8], "z": [8, 8]}, {"padded": [8, 8], "y": [8, 8], "w": [8, 8]}).data
    )
    assert integer(Artifact.from_bytes(model.SerializeToString())) == {"product", "padded", "y", "w"}
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    for node in model.graph.node:
        if node.output[0] in ("padded", "unknown"):
            node.domain = "com.microsoft"
        if node.output[0] == "unknown":
            node.op_type = "Gelu"  # of unknown type
    assert integer(Artifact.from_bytes(model.SerializeToString())) == {"product", "y"}


def test_activations_are_no_shapes() -> None:
    n = networks.Network()
    product = n.op("MatMul", "x", n.normal(8, 8), name="product")
    turned = n.op("Reshape", product, n.op("Shape", "x", name="shape"), name="turned")
    n.op("MatMul", turned, n.normal(8, 8), name="y")
    model = FloatModel(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}))
    assert model.activations(model.integer_nodes(QdqPlacement.WIDE)) == ["x", "product", "turned", "y"]


def test_only_constant_nodes_become_weights() -> None:
    n = networks.Network()
    filled = n.op(
        "ConstantOfShape", n.op("Shape", "x"), value=helper.make_tensor("value", 1, [1], [2.0]), name="filled"
    )
    n.op("Mul", n.op("Add", "x", filled), n.op("Constant", value_float=3.0, name="three"), name="y")
    model = FloatModel(n.artifact({"x": ["N", 8]}, {"y": ["N", 8]}))
    assert not model.weights.keys() & {"filled", "three"}
    assert {"filled", "three"} <= model.producers.keys()


def test_every_gemm_is_made_plain_if_it_can_be() -> None:
    n = networks.Network()
    n.gemm("x", 8, 8, name="plain")
    n.op("Gemm", "x", n.normal(8, 8), name="scaled", alpha=3.0)
    n.op("Gemm", "x", n.weight(np.full((8, 8), 1e30, np.float32)), name="infinite", alpha=1e30)
    n.op("Gemm", "x", n.weight(np.full((8, 8), np.inf, np.float32)), n.normal(4, 8), name="rows")
    outputs: dict[str, list[int | str]] = {name: [4, 8] for name in ("plain", "scaled", "infinite", "rows")}
    assert integer(n.artifact({"x": [4, 8]}, outputs)) == {"plain", "scaled"}


def test_a_grouped_convolution_is_integer() -> None:
    n = networks.Network()
    n.op("Conv", "x", n.normal(4, 2, 1, 1), name="y", group=2)
    assert integer(n.artifact({"x": ["N", 4, 8, 8]}, {"y": ["N", 4, 8, 8]})) == {"y"}
