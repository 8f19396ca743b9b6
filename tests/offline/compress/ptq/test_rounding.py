from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import networks
from penstock.artifact import Artifact
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.rounding import Rounding


def rounding(artifact: Artifact, placement: QdqPlacement) -> Rounding:
    model = FloatModel(artifact)
    return Rounding(model, model.integer_nodes(placement), placement)


def test_results_of_products_stay_float_in_the_linear_placement() -> None:
    found = rounding(networks.mlp(), QdqPlacement.LINEAR)
    assert found.sources == {name: name for name in ("x", "hidden", "relu3")}
    assert not found.absorbed


def test_a_relu_that_alone_reads_a_convolution_is_replaced_by_its_range() -> None:
    found = rounding(networks.cnn(), QdqPlacement.WIDE)
    assert found.absorbed == {"conv0": "stem", "conv2": "relu3", "add5": "relu6"}
    assert found.removed == {"Relu_1", "Relu_3", "Relu_6"}
    assert not found.absorbed.keys() & found.sources.keys()


@pytest.mark.parametrize("second_reader", ["output", "node", "none"])
def test_a_relu_stays_if_its_input_has_another_reader(second_reader: str) -> None:
    n = networks.Network()
    inner = n.conv("x", 3, 4)
    outputs: dict[str, list[int | str]] = {n.conv(n.op("Relu", inner), 4, 4): ["N", 4, 8, 8]}
    if second_reader == "output":
        outputs[inner] = ["N", 4, 8, 8]
    if second_reader == "node":
        outputs[n.op("Neg", inner)] = ["N", 4, 8, 8]
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, outputs), QdqPlacement.LINEAR)
    assert (inner in found.absorbed) is (second_reader == "none")
    assert (inner in found.sources) is (second_reader != "none")


@pytest.mark.parametrize(("value", "shares"), [(None, True), (0.0, True), (1.0, False)])
def test_operators_that_move_values_share_the_scale_of_their_input(value: float | None, shares: bool) -> None:
    n = networks.Network()
    first = n.conv("x", 3, 4)
    pads = [n.weight(np.array([0, 0, 1, 1, 0, 0, 1, 1]))] + ([] if value is None else [n.weight(np.float32(value))])
    pooled = n.op("MaxPool", first, kernel_shape=[2, 2])
    padded = n.op("Pad", pooled, *pads)
    y = n.conv(padded, 4, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 9, 9]}), QdqPlacement.WIDE)
    assert found.sources[pooled] == first
    assert found.sources[padded] == (first if shares else padded)


def test_constants_are_rounded_like_activations_where_they_are_added_or_multiplied() -> None:
    n = networks.Network()
    inner = n.op("Relu", n.conv("x", 3, 4))
    added = n.op("Add", n.op("Reshape", inner, n.weight(np.array([0, 4, 64]))), n.normal(4, 1))
    n.op("MatMul", added, n.normal(64, 2), name="y")
    artifact = n.artifact({"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 2]})
    model = FloatModel(artifact)
    nodes = model.integer_nodes(QdqPlacement.WIDE)
    found = Rounding(model, nodes, QdqPlacement.WIDE)
    assert {node.op_type: found.constant_inputs(node) for node in nodes} == {
        "Conv": [],
        "Relu": [],
        "Reshape": [],
        "Add": [1],
        "MatMul": [],
    }


def test_an_activation_of_the_models_input_is_not_replaced() -> None:
    n = networks.Network()
    n.conv(n.op("Relu", n.conv("x", 3, 4)), 4, 4)
    n.op("MaxPool", n.nodes[-1].output[0], kernel_shape=[2, 2], name="y")
    artifact = n.artifact({"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 7, 7]})
    model = FloatModel(artifact)
    relu, conv = model.nodes[1], model.nodes[2]
    found = Rounding(model, [relu, conv], QdqPlacement.WIDE)
    assert found.absorbed == {}
    assert relu.input[0] not in found.sources
    found = Rounding(model, model.nodes, QdqPlacement.WIDE)
    assert list(found.absorbed.values()) == [relu.output[0]]
    assert found.sources["y"] == conv.output[0]


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_padding_with_the_tensors_own_values_keeps_them(mode: str) -> None:
    n = networks.Network()
    padded = n.op("Pad", n.conv("x", 3, 4), n.weight(np.array([0, 0, 1, 1, 0, 0, 1, 1])), mode=mode)
    y = n.conv(padded, 4, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 10, 10]}), QdqPlacement.WIDE)
    assert found.sources[padded] != padded


def test_padding_with_a_computed_value_has_a_range_of_its_own() -> None:
    n = networks.Network()
    pads = n.weight(np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    padded = n.op("Pad", n.conv("x", 3, 4), pads, n.op("ReduceMax", "x", keepdims=0))
    y = n.conv(padded, 4, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 10, 10]}), QdqPlacement.WIDE)
    assert found.sources[padded] == padded


def branch(reader: str) -> onnx.GraphProto:
    """A graph that negates ``reader``."""
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node("Neg", [reader], ["result"])], "branch", [], [result])


@pytest.mark.parametrize(
    "operators", [("Transpose",), ("Transpose", "Flatten"), ("Identity", "Transpose"), ("Neg",), ()]
)
def test_what_is_moved_into_a_subgraph_is_what_is_only_passed_on_to_it(operators: tuple[str, ...]) -> None:
    n = networks.Network()
    first = n.conv("x", 3, 4)
    tensors = [first]
    for operator in operators:
        tensors.append(n.op(operator, tensors[-1]))
    n.op("Flatten", first, name="elsewhere")
    n.op("If", n.weight(np.array(True)), name="y", then_branch=branch(tensors[-1]), else_branch=branch(tensors[-1]))
    outputs: dict[str, list[int | str]] = {"y": ["N", 4, 8, 8], "elsewhere": ["N", 256]}
    model = FloatModel(n.artifact({"x": ["N", 3, 8, 8]}, outputs))
    found = Rounding(model, model.integer_nodes(QdqPlacement.WIDE), QdqPlacement.WIDE).moved_into_subgraphs()
    assert found == (set() if operators == ("Neg",) else set(tensors[:-1]))


def test_the_result_of_a_product_is_rounded_only_for_an_integer_reader() -> None:
    n = networks.Network()
    read = n.op("MatMul", "x", n.normal(16, 16), name="read")
    n.op("Add", read, n.op("MatMul", read, n.normal(16, 16), name="inner"), name="sum")
    n.op("MatMul", "sum", n.normal(16, 4), name="y")
    found = rounding(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), QdqPlacement.WIDE)
    assert {"x", "read", "inner", "sum"} <= found.sources.keys()
    assert "y" not in found.sources


def test_a_relu_of_a_shared_scale_keeps_its_own_range() -> None:
    """Its input has the range of another tensor, which the activation must not clip."""
    n = networks.Network()
    first = n.conv("x", 3, 4)
    pooled = n.op("MaxPool", first, kernel_shape=[2, 2])
    active = n.op("Relu", pooled)
    y = n.conv(active, 4, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 7, 7]}), QdqPlacement.WIDE)
    assert found.absorbed == {}
    assert found.sources[pooled] == first
    assert found.sources[active] == active


def test_a_slice_shares_the_scale_of_its_input() -> None:
    n = networks.Network()
    first = n.conv("x", 3, 4)
    bounds = [n.weight(np.array([place])) for place in (0, 2, 1)]
    part = n.op("Slice", first, *bounds)
    y = n.conv(part, 2, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 8, 8]}), QdqPlacement.WIDE)
    assert found.sources[part] == first


def test_the_result_of_a_convolution_is_rounded_even_if_only_the_caller_reads_it() -> None:
    n = networks.Network()
    y = n.conv("x", 3, 4)
    found = rounding(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 8, 8]}), QdqPlacement.WIDE)
    assert found.sources == {"x": "x", y: y}


def test_a_product_that_an_integer_activation_reads_is_absorbed_by_it() -> None:
    n = networks.Network()
    product = n.op("MatMul", "x", n.normal(16, 16))
    active = n.op("Relu", product)
    model = FloatModel(n.artifact({"x": ["N", 16]}, {active: ["N", 16]}))
    found = Rounding(model, model.nodes, QdqPlacement.WIDE)
    assert found.absorbed == {product: active}
    assert found.sources == {"x": "x", active: active}


def test_parts_of_the_models_input_have_its_range() -> None:
    n = networks.Network()
    n.nodes.append(onnx.helper.make_node("Split", ["x"], ["left", "right"], axis=1))
    n.op("Add", "left", "right", name="y")
    model = FloatModel(n.artifact({"x": ["N", 4, 8, 8]}, {"y": ["N", 2, 8, 8]}))
    found = Rounding(model, model.nodes, QdqPlacement.WIDE)
    assert found.sources == {"x": "x", "left": "x", "right": "x", "y": "y"}


@pytest.mark.parametrize(
    ("low", "clips_exactly", "is_replaced"), [(0, False, True), (-1, True, True), (-1, False, False)]
)
def test_a_range_that_may_be_wider_does_not_replace_a_clip_of_negative_values(
    low: float, clips_exactly: bool, is_replaced: bool
) -> None:
    n = networks.Network()
    inner = n.conv("x", 3, 4)
    clipped = n.op("Clip", inner, n.weight(np.float32(low)), n.weight(np.float32(6)))
    y = n.conv(clipped, 4, 4)
    model = FloatModel(n.artifact({"x": ["N", 3, 8, 8]}, {y: ["N", 4, 8, 8]}))
    nodes = model.integer_nodes(QdqPlacement.LINEAR)
    found = Rounding(model, nodes, QdqPlacement.LINEAR, clips_exactly)
    assert (inner in found.absorbed) is is_replaced
    assert clipped in found.sources


def biased_attention(outputs: int = 1) -> FloatModel:
    """Attention whose queries and keys have biases and are transposed."""
    n = networks.Network()
    moved = []
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        biased = n.op("Add", n.op("MatMul", "x", n.normal(8, 8), name=f"{name}0"), n.normal(8), name=name)
        split = n.op("Reshape", biased, n.weight(np.array([0, 0, 2, 4])), name=f"{name}1")
        moved.append(n.op("Transpose", split, perm=perm, name=f"{name}2"))
    scores = n.op("MatMul", moved[0], moved[1], name="scores")
    mixed = n.op("MatMul", n.op("Softmax", scores, name="shares"), moved[2], name="mixed")
    n.op("MatMul", mixed, n.normal(4, 4), name="y")
    return FloatModel(n.artifact({"x": ["N", 5, 8]}, {"y": ["N", 2, 5, 4]}))


def test_the_attention_placement_rounds_queries_and_keys_after_their_biases() -> None:
    model = biased_attention()
    nodes = model.integer_nodes(QdqPlacement.ATTENTION)
    found = Rounding(model, nodes, QdqPlacement.ATTENTION)
    assert {node.output[0] for node in nodes} == {"q0", "k0", "v0", "q", "k", "q1", "k1", "q2", "k2", "scores", "y"}
    assert found.sources == {"x": "x", "mixed": "mixed"} | {
        f"{name}{at}": name for name in "qk" for at in ("", "1", "2")
    }


def test_in_no_placement_is_a_product_rounded_before_its_bias() -> None:
    model = biased_attention()
    for placement in QdqPlacement:
        found = Rounding(model, model.integer_nodes(placement), placement)
        assert {"q0", "k0", "v0"}.isdisjoint(found.sources)
    bias = next(node for node in model.nodes if node.output[0] == "q")
    assert found.constant_inputs(bias) == []
