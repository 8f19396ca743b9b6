"""Valid requests that would end the process in ONNX Runtime 1.31 itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from penstock.artifact import Artifact
from penstock.engines.integer_division import guarded
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.apart import apart
from penstock.protocol.onnx_scan import has_recurrence
from penstock.tensor import Array

_INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64]


def _onnx_type(datatype: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(datatype)))


def _model(
    nodes: list[onnx.NodeProto],
    datatype: Any,
    initializers: list[onnx.TensorProto] | None = None,
    opset: int = 17,
    **names: str,
) -> onnx.ModelProto:
    places = [helper.make_tensor_value_info(name, _onnx_type(datatype), ["n"]) for name in names.get("inputs", "ab")]
    output = helper.make_tensor_value_info("y", _onnx_type(datatype), ["n"])
    graph = helper.make_graph(nodes, "g", places, [output], initializers or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _division(operator: str, datatype: Any, form: str = "direct", opset: int = 17) -> onnx.ModelProto:
    """``y`` = ``a`` / ``b``. The forms differ in where the types of the operands are known."""
    fmod = {"fmod": 1} if form == "fmod" else {}
    if form in ("initializer", "Constant"):
        constant = numpy_helper.from_array(np.array([-1], datatype), "b")
        made = [] if form == "initializer" else [helper.make_node("Constant", [], ["b"], value=constant)]
        kept = [constant] if form == "initializer" else []
        return _model([*made, helper.make_node(operator, ["a", "b"], ["y"])], datatype, kept, opset, inputs="a")
    if form == "unknown":  # only ONNX Runtime infers the type
        nodes = [
            helper.make_node("Tile", ["a", "r"], ["c"]),
            helper.make_node("Tile", ["b", "r"], ["d"]),
            helper.make_node(operator, ["c", "d"], ["e"]),
            helper.make_node("Tile", ["e", "r"], ["y"]),
        ]
        return _model(nodes, datatype, [numpy_helper.from_array(np.array([1]), "r")], opset)
    return _model([helper.make_node(operator, ["a", "b"], ["y"], **fmod)], datatype, opset=opset)


@pytest.mark.parametrize("datatype", [np.int8, np.int16, np.int32, np.int64], ids=lambda each: each.__name__)
@pytest.mark.parametrize("form", ["direct", "fmod", "unknown", "initializer", "Constant"])
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_the_smallest_number_by_minus_one(operator: str, form: str, datatype: Any) -> None:
    if operator == "Div" and form == "fmod":
        form = "direct"
    smallest = np.iinfo(datatype).min
    inputs = {"a": np.array([smallest, 7, -7], datatype), "b": np.array([-1, -1, -1], datatype)}
    if form in ("initializer", "Constant"):
        del inputs["b"]
    artifact = Artifact.from_bytes(_division(operator, datatype, form).SerializeToString())
    found = apart.forward(artifact, inputs, as_written=False)["y"]
    assert found.tolist() == ([smallest, -7, 7] if operator == "Div" else [0, 0, 0])
    assert found.dtype == datatype


def _quotient(a: Array, b: Array) -> Array:
    """The quotient of ``a`` and ``b`` that wraps around, rounded towards zero."""
    exact = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return np.array(exact, object)


@pytest.mark.parametrize("datatype", _INTEGERS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("operator", ["Div", "Mod", "fmod"])
@given(data=st.data())
def test_guarded_divisions_equal_the_divisions_of_numpy(operator: str, datatype: Any, data: st.DataObject) -> None:
    if operator == "fmod" and np.dtype(datatype).itemsize == 8:
        pytest.skip("ONNX Runtime computes this remainder in FP64, which rounds large numbers")
    limits = np.iinfo(datatype)
    numbers = st.integers(int(limits.min), int(limits.max))
    small = st.integers(max(-3, int(limits.min)), 3)
    pairs = data.draw(st.lists(st.tuples(numbers | small, (numbers | small).filter(bool)), min_size=1, max_size=20))
    pairs = [(x, y) for x, y in pairs if (x, y) != (limits.min, -1)] or [(1, 1)]
    a, b = (np.array(each, datatype) for each in zip(*pairs, strict=True))
    name = ("Mod", "fmod") if operator == "fmod" else (operator, "direct")
    found = _loaded(*name, datatype).forward({"a": a, "b": b})["y"]
    exact = _quotient(a, b) if operator == "Div" else np.fmod(a, b) if operator == "fmod" else np.mod(a, b)
    assert found.tolist() == exact.tolist()


_models: dict[tuple[str, str, Any], Any] = {}


def _loaded(operator: str, form: str, datatype: Any) -> Any:
    key = operator, form, datatype
    if key not in _models:
        model = _division(operator, datatype, form).SerializeToString()
        _models[key] = OnnxRuntimeEngine().load(Artifact.from_bytes(model), {"threads": 1})
    return _models[key]


def _no_probe(model: bytes) -> dict[str, str]:
    raise AssertionError("the types are known")


@pytest.mark.parametrize("opset", [7, 8, 9, 13, 17])
def test_a_guarded_model_is_valid(opset: int) -> None:
    model = guarded(_division("Div", np.int64, opset=opset).SerializeToString(), _no_probe)
    parsed = onnx.load_model_from_string(model)
    onnx.checker.check_model(parsed, full_check=True)
    assert [node.op_type for node in parsed.graph.node].count("Div") == 1
    loaded = OnnxRuntimeEngine().load(Artifact.from_bytes(model), {})
    assert loaded.forward({"a": np.array([9, -9]), "b": np.array([-1, 2])})["y"].tolist() == [-9, -4]


def test_models_without_such_divisions_stay_as_they_are() -> None:
    halved = [numpy_helper.from_array(np.array([2], np.int64), "b")]
    root = [helper.make_node("Sqrt", ["b"], ["c"]), helper.make_node("Div", ["a", "c"], ["y"])]
    for model in (
        _division("Div", np.float32),
        _division("Div", np.uint64),
        _division("Div", np.int16),
        _model([helper.make_node("Div", ["a", "b"], ["y"])], np.int64, halved, inputs="a"),
        _model(root, np.float32),
        _model([helper.make_node("Add", ["a", "b"], ["y"])], np.int64),
    ):
        data = model.SerializeToString()
        assert guarded(data, _no_probe) is data


def test_a_default_value_of_a_divisor_may_be_replaced() -> None:
    default = [numpy_helper.from_array(np.array([2], np.int64), "b")]
    model = _model([helper.make_node("Div", ["a", "b"], ["y"])], np.int64, default)
    inputs = {"a": np.array([-(2**63)]), "b": np.array([-1])}
    found = apart.forward(Artifact.from_bytes(model.SerializeToString()), inputs, as_written=False)
    assert found["y"].tolist() == [-(2**63)]


def test_a_divisor_in_an_external_file(tmp_path: Path) -> None:
    model = _division("Div", np.int64, "initializer")
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    artifact = Artifact.from_file(tmp_path / "m.onnx")
    for each in (artifact, Artifact.from_files("m.onnx", artifact.files(), artifact.format)):
        found = apart.forward(each, {"a": np.array([-(2**63), 7])}, as_written=False)
        assert found["y"].tolist() == [-(2**63), -7]


@pytest.mark.parametrize("body", ["If", "Loop"])
def test_divisions_in_bodies(body: str) -> None:
    division = helper.make_node("Div", ["a", "b"], ["q"])
    value = helper.make_tensor_value_info("q", onnx.TensorProto.INT64, None)
    nodes = [helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))]
    if body == "If":
        inner = helper.make_graph([division], "then", [], [value])
        other = helper.make_graph(
            [helper.make_node("Identity", ["a"], ["o"])], "else", [], [helper.make_empty_tensor_value_info("o")]
        )
        nodes += [helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=other)]
    else:
        places = [helper.make_tensor_value_info(*each) for each in (("i", 7, []), ("go", 9, []), ("s", 7, ["n"]))]
        kept = [helper.make_node("Identity", ["go"], ["on"])]
        ends = [helper.make_tensor_value_info("on", 9, []), value]
        inner = helper.make_graph([helper.make_node("Div", ["s", "b"], ["q"]), *kept], "body", places, ends)
        nodes += [helper.make_node("Constant", [], ["times"], value=numpy_helper.from_array(np.array(1)))]
        nodes += [helper.make_node("Loop", ["times", "yes", "a"], ["y"], body=inner)]
    artifact = Artifact.from_bytes(_model(nodes, np.int64).SerializeToString())
    inputs = {"a": np.array([-(2**63), 7]), "b": np.array([-1, -2])}
    assert apart.forward(artifact, inputs, as_written=False)["y"].tolist() == [-(2**63), -3]


def _recurrent(operator: str, datatype: Any, direction: str) -> onnx.ModelProto:
    directions, gates = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    weights = [np.full((directions, 4 * gates, width), 0.1, datatype) for width in (3, 4)]
    constants = [numpy_helper.from_array(each, name) for each, name in zip(weights, "wr", strict=True)]
    node = helper.make_node(operator, ["x", "w", "r"], ["", "y"], hidden_size=4, direction=direction)
    kind = _onnx_type(datatype)
    places = [
        helper.make_tensor_value_info(*each) for each in (("x", kind, ["t", "n", 3]), ("y", kind, [directions, "n", 4]))
    ]
    graph = helper.make_graph([node], "g", places[:1], places[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("datatype", [np.float32, np.float16], ids=lambda each: each.__name__)
@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_empty_inputs_of_recurrent_operators_are_refused(operator: str, datatype: Any, direction: str) -> None:
    model = _recurrent(operator, datatype, direction)
    artifact = Artifact.from_bytes(model.SerializeToString())
    for shape in ((0, 2, 3), (5, 0, 3), (0, 0, 3)):
        said = rf"input 'x' of shape \[{shape[0]}, {shape[1]}, 3\] is empty"
        with pytest.raises(PenstockError, match=said):
            apart.forward(artifact, {"x": np.ones(shape, datatype)}, as_written=False)
        with pytest.raises(InvalidArgument, match=said):  # in this process, as in a server
            OnnxRuntimeEngine().load(artifact, {}).forward({"x": np.ones(shape, datatype)})
    found = apart.forward(artifact, {"x": np.ones((1, 1, 3), datatype)}, as_written=False)["y"]
    assert found.shape[1:] == (1, 4)


def test_recurrent_operators_are_found_in_bodies() -> None:
    model = _recurrent("GRU", np.float32, "forward")
    assert has_recurrence(model.SerializeToString())
    inner = helper.make_graph(list(model.graph.node), "body", [], [helper.make_tensor_value_info("y", 1, None)])
    branch = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    outer = helper.make_model(helper.make_graph([branch], "LSTM", [], []))
    assert has_recurrence(outer.SerializeToString())
    function = helper.make_function(
        "f", "F", ["x", "w", "r"], ["y"], list(model.graph.node), [helper.make_opsetid("", 17)]
    )
    assert has_recurrence(
        helper.make_model(helper.make_graph([], "g", [], []), functions=[function]).SerializeToString()
    )
    assert not has_recurrence(
        _model([helper.make_node("Add", ["a", "b"], ["y"], name="LSTM")], np.int64).SerializeToString()
    )
