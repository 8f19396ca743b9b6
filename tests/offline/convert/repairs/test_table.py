"""Each test makes a model with one fault, shows that ONNX Runtime or the checker refuses it, and that the repaired model runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.zoo.onnx import faulty, group_norm_18, model, outer_value, value
from penstock.artifact import Artifact
from penstock.errors import InvalidModel, PenstockError
from penstock.offline.convert.repairs import repair
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.tensor import Array

X = np.random.default_rng(0).normal(size=(2, 3, 6, 8)).astype(np.float32)


def runs(artifact: Artifact) -> Array:
    """The output of a model that the checker and ONNX Runtime accept. Raises PenstockError."""
    read_proto(artifact)
    with loaded(artifact, as_written=True) as loaded_model:
        (output,) = loaded_model.forward({"x": X[:, :, :, : loaded_model.signature.inputs[0].shape[-1]]}).values()
    return output


def relus(*changes: Callable[[onnx.ModelProto], object]) -> Artifact:
    """x -> Relu -> a -> Tanh -> y, changed."""
    proto = model([helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])], 17)
    for change in changes:
        change(proto)
    return Artifact.from_bytes(proto.SerializeToString())


def swap(proto: onnx.ModelProto) -> None:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(proto.graph.node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def name_all(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = "node"


FAULTS = {
    "IR version": relus(lambda proto: setattr(proto, "ir_version", 14)),
    "no IR version": relus(lambda proto: proto.ClearField("ir_version")),
    "operator sets": relus(lambda proto: setattr(proto.graph.node[0], "domain", "ai.onnx")),
    "not in the order": relus(swap),
    "the same name": relus(name_all),
    "contradicted": relus(lambda proto: proto.graph.value_info.append(value("a", [1], TensorProto.INT64))),
    "contradicted output": relus(
        lambda proto: setattr(proto.graph.output[0].type.tensor_type, "elem_type", TensorProto.INT64)
    ),
    "contradicted type": relus(lambda proto: proto.graph.output[0].ClearField("type")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_repaired(name: str) -> None:
    broken = FAULTS[name]
    with pytest.raises(PenstockError):
        runs(broken)
    repaired, done = repair(broken)
    np.testing.assert_allclose(runs(repaired), np.tanh(np.maximum(X, 0)), atol=1e-6, strict=True)
    assert len(done) == 1
    assert repaired.digest != broken.digest
    assert repair(repaired) == (repaired, ())


def test_a_model_without_faults_stays_the_same() -> None:
    artifact = relus()
    assert repair(artifact) == (artifact, ())


def test_branches_that_return_or_hide_tensors_from_outside() -> None:
    broken = Artifact.from_bytes(outer_value().SerializeToString())
    with pytest.raises(PenstockError):
        runs(broken)
    repaired, done = repair(broken)
    expected = np.tanh(X) + (X if X.sum() > 0 else np.abs(X))
    np.testing.assert_allclose(runs(repaired), expected, atol=1e-6)
    assert "'a', 'x'" in done[0]


def test_upsample_of_an_opset_without_it() -> None:
    nodes = [helper.make_node("Upsample", ["x", "s"], ["y"], mode="linear")]
    weights = {"s": np.array([1, 1, 2, 3], np.float32)}
    expected = runs(Artifact.from_bytes(model(nodes, 9, weights=weights).SerializeToString()))
    for opset in (11, 13, 21):
        broken = Artifact.from_bytes(model(nodes, opset, weights=weights).SerializeToString())
        with pytest.raises(PenstockError):
            runs(broken)
        np.testing.assert_array_equal(runs(repair(broken)[0]), expected)


def test_group_normalization_of_opset_18() -> None:
    broken = Artifact.from_bytes(group_norm_18().SerializeToString())
    with pytest.raises(InvalidModel, match="deprecated"):
        read_proto(broken)
    array = np.random.default_rng(0).normal(size=(2, 4, 5, 6)).astype(np.float32)
    rows = array.reshape(2, 2, -1)
    rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    expected = rows * [[[1], [2]]] + [[[0.5], [-1]]]
    with loaded(repair(broken)[0]) as loaded_model:
        found = loaded_model.forward({"x": array})["y"]
    np.testing.assert_allclose(found.reshape(2, 2, -1), expected, atol=1e-5)


def test_text_features_load_without_the_american_locale() -> None:
    """ONNX Runtime refuses en_US.UTF-8 where that locale is not installed, which is so on most servers."""
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="en_US.UTF-8")
    graph = helper.make_graph(
        [node], "text", [value("x", ["N"], TensorProto.STRING)], [value("y", ["N"], TensorProto.STRING)]
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    repaired, done = repair(Artifact.from_bytes(proto.SerializeToString()))
    assert "C.UTF-8" in done[0]
    texts = np.array([b"HELLO", "ÜBER Straße".encode()], np.object_)
    with loaded(repaired) as loaded_model:
        assert [one.decode() for one in loaded_model.forward({"x": texts})["y"]] == ["hello", "über straße"]


def test_many_faults_at_once() -> None:
    repaired, done = repair(Artifact.from_bytes(faulty().SerializeToString()))
    assert len(done) == 6
    assert runs(repaired).shape == (2, 3, 12, 16)


def test_a_cycle_is_left_to_the_checker() -> None:
    proto = model([helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])], 17)
    repaired, _ = repair(Artifact.from_bytes(proto.SerializeToString()))
    with pytest.raises(InvalidModel):
        read_proto(repaired)


def test_a_long_chain_in_reverse_order_is_sorted() -> None:
    count = 3000
    nodes = [
        helper.make_node("Neg", [f"t{n}" if n else "x"], [f"t{n + 1}" if n + 1 < count else "y"]) for n in range(count)
    ]
    repaired, _ = repair(Artifact.from_bytes(model(nodes[::-1], 17).SerializeToString()))
    np.testing.assert_array_equal(runs(repaired), X)


def test_a_file_that_is_no_model() -> None:
    with pytest.raises(InvalidModel, match="not an ONNX model"):
        repair(Artifact.from_bytes(b"\xff\xff\xff"))
