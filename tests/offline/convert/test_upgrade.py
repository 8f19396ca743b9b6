from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from benchmarks.zoo.onnx import model, value
from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.convert.repairs.graphs import opset_of
from penstock.offline.convert.upgrade import upgrade
from penstock.offline.sessions import loaded
from penstock.tensor import Array

X = np.random.default_rng(0).normal(size=(2, 3, 6, 8)).astype(np.float32)


def run(proto: onnx.ModelProto) -> Array:
    with loaded(Artifact.from_bytes(proto.SerializeToString()), as_written=True) as loaded_model:
        return loaded_model.forward({"x": X})["y"]


def scaled(op_type: str, opset: int, mode: str, *scales: float) -> onnx.ModelProto:
    return model(
        [helper.make_node(op_type, ["x", "s"], ["y"], "node", mode=mode)],
        opset,
        weights={"s": np.array(scales, np.float32)},
    )


OLD = {
    **{
        f"{op_type} {mode} {height} {width}": scaled(op_type, opset, mode, 1, 1, height, width)
        for op_type, opset in (("Upsample", 9), ("Resize", 10))
        for mode in ("nearest", "linear")
        for height, width in ((2, 3), (2, 2.5), (0.5, 0.4), (2, 0.4), (0.3, 1.7), (1, 1))
        if op_type == "Resize" or min(height, width) >= 1
    },
    **{
        f"{op_type} {axis}": model([helper.make_node(op_type, ["x"], ["y"], axis=axis)], 11)
        for op_type in ("Softmax", "LogSoftmax", "Hardmax")
        for axis in (0, 1, 2, 3, -1)
    },
}


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("opset", [11, 13, 18, 21])
def test_results_stay_the_same(name: str, opset: int) -> None:
    made = upgrade(OLD[name], opset)
    onnx.checker.check_model(made)
    assert opset_of(made) == opset
    np.testing.assert_array_equal(run(made), run(OLD[name]))


@pytest.mark.parametrize("name", ["Upsample linear 2 3", "Resize nearest 0.5 0.4", "Hardmax 1"])
def test_the_converter_alone_changes_results(name: str) -> None:
    """If this fails, ``onnx.version_converter`` was corrected, and ``upgrade`` can be simplified."""
    made = onnx.version_converter.convert_version(OLD[name], 21)
    assert np.abs(run(made) - run(OLD[name])).max() > 0.1


def test_local_functions_are_kept() -> None:
    body = [helper.make_node("Softmax", ["a"], ["b"], axis=1)]
    function = helper.make_function("local", "Wide", ["a"], ["b"], body, [helper.make_opsetid("", 11)])
    proto = model([helper.make_node("Wide", ["x"], ["y"], domain="local")], 11, domains={"local": 1})
    proto.functions.append(function)
    assert not onnx.version_converter.convert_version(proto, 21).functions  # but the call remains
    np.testing.assert_array_equal(run(upgrade(proto, 21)), run(proto))


def test_names_of_tensors_and_nodes_are_kept() -> None:
    nodes = [
        helper.make_node("Upsample", ["x", "s"], ["a"], "up", mode="linear"),
        helper.make_node("Softmax", ["a"], ["b"], "soft", axis=1),
        helper.make_node("Squeeze", ["b"], ["c"], "squeeze", axes=[0]),
        helper.make_node("Unsqueeze", ["c"], ["y"], "unsqueeze", axes=[0]),
    ]
    proto = model(nodes, 9, shape=(1, 3, 6, 8), weights={"s": np.array([1, 1, 2, 2], np.float32)})
    proto.metadata_props.add(key="author", value="someone")
    made = upgrade(proto, 21)
    names = {output: node.name for node in made.graph.node for output in node.output}
    assert {name: names[name] for name in "acy"} == {"a": "up", "c": "squeeze", "y": "unsqueeze"}
    assert "b" in names  # a Reshape, after the Softmax that is called "soft"
    assert [value.name for value in made.graph.output] == ["y"]
    assert made.metadata_props[0].value == "someone"


def test_graphs_within_nodes_are_converted_too() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Upsample", ["state"], ["up"], mode="linear", scales=[1.0, 1.0, 2.0, 1.0]),
            helper.make_node("Slice", ["up"], ["cut"], axes=[2], starts=[1], ends=[7]),
            helper.make_node("Hardmax", ["cut"], ["next"], axis=2),
        ],
        "body",
        [value("i", [], onnx.TensorProto.INT64), value("go", [], onnx.TensorProto.BOOL), value("state", X.shape)],
        [value("go_on", [], onnx.TensorProto.BOOL), value("next", X.shape)],
    )
    proto = model([helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)], 8, weights={"n": np.array(2, np.int64)})
    np.testing.assert_array_equal(run(upgrade(proto, 21)), run(proto))


def test_scales_that_the_graph_computes() -> None:
    nodes = [
        helper.make_node("Add", ["s", "s"], ["scales"]),
        helper.make_node("Upsample", ["x", "scales"], ["y"], mode="nearest"),
    ]
    proto = model(nodes, 9, weights={"s": np.array([0.5, 0.5, 1, 1.25], np.float32)})
    np.testing.assert_array_equal(run(upgrade(proto, 21)), run(proto))


def test_a_newer_model_stays_as_it_is() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], 21)
    assert upgrade(proto, 17) is proto
    assert upgrade(proto, 21) is proto


def test_what_cannot_be_converted_is_said() -> None:
    tensor = numpy_helper.from_array(np.ones(1, np.float32), "w")
    proto = model([helper.make_node("Upsample", ["x"], ["y"], mode="linear")], 7)
    proto.graph.initializer.append(tensor)
    with pytest.raises(Unsupported, match="cannot be converted from opset 7 to 21"):
        upgrade(proto, 21)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_empty_tensors_keep_their_shapes(op_type: str) -> None:
    proto = model([helper.make_node(op_type, ["x"], ["y"], axis=1)], 11)
    for made in (proto, upgrade(proto, 21)):
        with loaded(Artifact.from_bytes(made.SerializeToString()), as_written=True) as loaded_model:
            assert loaded_model.forward({"x": X[:0]})["y"].shape == (0, 3, 6, 8)
