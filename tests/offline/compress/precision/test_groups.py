from __future__ import annotations

import functools
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import networks
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.precision.groups import MixedModel, OperatorGroup, find_groups
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.optimizer import optimize
from penstock.tensor import DataType

DIGITS = Path(__file__).parents[4] / "examples" / "digits" / "model.onnx"
SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")


def groups(artifact: Artifact, placement: QdqPlacement) -> dict[str, str]:
    model = FloatModel(artifact)
    found = find_groups(model, model.integer_nodes(placement))
    return {group.name: "+".join(group.operators) for group in found}


def squeeze_excite() -> Artifact:
    """x (N, 4, 6, 6): a convolution whose channels are weighted by a branch of its own average, and another one."""
    n = networks.Network()
    x = n.op("Relu", n.conv("x", 4, 4), name="trunk")
    y = n.op("Relu", n.conv(n.op("GlobalAveragePool", x), 4, 2, 1))
    y = n.conv(n.op("Mul", x, n.op("Sigmoid", n.conv(y, 2, 4, 1), name="gate")), 4, 4, 1)
    return n.artifact({"x": ["N", 4, 6, 6]}, {y: ["N", 4, 6, 6]})


def branches() -> Artifact:
    """x (N, 4, 6, 6): two branches and their input, concatenated, before a convolution."""
    n = networks.Network()
    x = n.op("Relu", n.conv("x", 4, 4), name="trunk")
    left, right = n.op("Relu", n.conv(x, 4, 4), name="left"), n.op("Relu", n.conv(x, 4, 4, 1), name="right")
    y = n.conv(n.op("Concat", left, right, x, axis=1), 12, 4, 1)
    return n.artifact({"x": ["N", 4, 6, 6]}, {y: ["N", 4, 6, 6]})


def test_activations_and_sums_go_with_the_convolution_before_them() -> None:
    assert groups(networks.cnn(), QdqPlacement.LINEAR) == {
        "conv0": "Conv+Relu",
        "conv2": "Conv+Relu",
        "conv4": "Conv",
        "y": "Gemm",
    }
    assert groups(networks.cnn(), QdqPlacement.WIDE) == {
        "conv0": "Conv+Relu",
        "conv2": "Conv+Relu",
        "conv4": "Conv+Add+Relu+MaxPool+GlobalAveragePool+Flatten",
        "y": "Gemm",
    }


def test_both_sides_of_a_sum_that_only_it_reads_are_one_group() -> None:
    folded, _ = optimize(Artifact.from_file(DIGITS))
    found = list(groups(folded, QdqPlacement.WIDE).values())
    assert found[4] == "Conv+Conv+Add+Relu"
    assert found[2] == "Conv+Add+Relu"


def test_query_key_and_value_are_one_group() -> None:
    assert groups(networks.attention(), QdqPlacement.LINEAR) == {"q": "MatMul+MatMul+MatMul", "matmul9": "MatMul"}
    wide = groups(networks.attention(), QdqPlacement.WIDE)
    assert list(wide) == ["q", "matmul9"]
    assert wide["matmul9"] == "MatMul"


def test_a_gate_goes_with_the_branch_that_made_it_and_a_concatenation_with_its_own_branches() -> None:
    assert list(groups(squeeze_excite(), QdqPlacement.WIDE).values()) == [
        "Conv+Relu+GlobalAveragePool",
        "Conv+Relu",
        "Conv+Sigmoid+Mul",
        "Conv",
    ]
    assert list(groups(branches(), QdqPlacement.WIDE).values()) == ["Conv+Relu", "Conv+Relu+Conv+Relu+Concat", "Conv"]


@st.composite
def graphs(draw: st.DrawFn) -> Artifact:
    """Random graphs of convolutions, activations, sums and concatenations over (N, 2, 4, 4)."""
    n = networks.Network()
    tensors = ["x"]
    for _ in range(draw(st.integers(1, 9))):
        one, other = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        kind = draw(st.sampled_from(["conv", "relu", "add", "concat", "softmax"]))
        if kind == "conv":
            tensors.append(n.conv(one, 2, 2, 1))
        elif kind == "relu":
            tensors.append(n.op("Relu", one))
        elif kind == "softmax":
            tensors.append(n.op("Softmax", one, axis=1))
        elif kind == "add":
            tensors.append(n.op("Add", one, other))
        else:
            tensors.append(n.op("Slice", n.op("Concat", one, other, axis=1), *SLICE))
    outputs = {name: ["N", 2, 4, 4] for name in draw(st.sets(st.sampled_from(tensors[1:]), min_size=1))}
    n.weights += [
        helper.make_tensor(name, TensorProto.INT64, [1], [at]) for name, at in zip(SLICE, (0, 2, 1), strict=True)
    ]
    return n.artifact({"x": ["N", 2, 4, 4]}, outputs)


SLICE = ("start", "stop", "axis")


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(QdqPlacement))
def test_every_integer_node_is_in_exactly_one_group(artifact: Artifact, placement: QdqPlacement) -> None:
    model = FloatModel(artifact)
    nodes = model.integer_nodes(placement)
    found = find_groups(model, nodes)
    assert sorted(name for group in found for name in group.nodes) == sorted(node.name for node in nodes)
    order = {node.name: index for index, node in enumerate(nodes)}
    firsts = [order[group.nodes[0]] for group in found]
    assert firsts == sorted(firsts)
    assert len({group.name for group in found}) == len(found)
    assert find_groups(model, nodes) == found


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_switching_groups_switches_exactly_their_nodes(artifact: Artifact, data: st.DataObject) -> None:
    model = FloatModel(artifact)
    nodes = model.integer_nodes(QdqPlacement.WIDE)
    found = find_groups(model, nodes)
    floats: set[OperatorGroup] = data.draw(st.sets(st.sampled_from(found))) if found else set()
    keep = {name for group in floats for name in group.nodes}
    left = {node.name for node in model.integer_nodes(QdqPlacement.WIDE, keep)}
    # Nothing is integer where no product is.
    assert left in ({node.name for node in nodes} - keep, set())


@functools.cache
def mixed(placement: QdqPlacement = QdqPlacement.WIDE) -> MixedModel:
    artifact = networks.cnn(8)
    return MixedModel(artifact, collect(artifact, {"x": networks.images(8)}), SCHEME, placement)


@pytest.mark.parametrize("placement", QdqPlacement)
def test_with_no_group_float_it_is_the_int8_model_and_with_all_the_original(placement: QdqPlacement) -> None:
    found = mixed(placement)
    whole = quantize(found.artifact, found.ranges, SCHEME, placement)
    assert found.with_float().data == whole.data
    assert found.with_float([group.name for group in found.groups]) is found.artifact
    part = found.with_float(["conv2"])
    assert part.provenance[-1].options["keep_float"] == sorted(found.nodes(["conv2"])) == ["Conv_2", "Relu_3"]
    assert part.data == found.with_float(["conv2"]).data


def test_weights_of_a_float_group_stay_as_they_were() -> None:
    graph = onnx.load_model_from_string(mixed().with_float(["y"]).data).graph
    gemm = next(node for node in graph.node if node.op_type == "Gemm")
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert weights[gemm.input[1]] == TensorProto.FLOAT


def test_an_unknown_group_and_a_model_without_products_are_errors() -> None:
    with pytest.raises(InvalidArgument, match="no group is called"):
        mixed().with_float(["conv1"])
    n = networks.Network()
    n.op("Relu", "x", name="y")
    artifact = n.artifact({"x": ["N", 2]}, {"y": ["N", 2]})
    with pytest.raises(Unsupported, match="no operator to quantise"):
        MixedModel(artifact, {}, SCHEME)
