from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import models
from conformance.engines import OnnxConformance
from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel, Severity
from penstock.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeModel, trim_arena
from penstock.errors import InvalidArgument, InvalidConfig, InvalidModel, Unsupported
from penstock.offline.apart import apart
from penstock.tensor import DataType, TensorSpec


class TestConformance(OnnxConformance):
    engine = OnnxRuntimeEngine()
    rejects = True


@pytest.mark.parametrize(
    ("field", "said", "hint"),
    [
        ("ir", "the model: Unsupported model IR version: 99", r"export it with IR version \d+ or older"),
        ("opset", r"the model: ONNX Runtime only .*Opset 99", r"export it with opset \d+ of ai\.onnx or older"),
    ],
)
def test_a_model_newer_than_the_runtime_is_told_what_it_takes(field: str, said: str, hint: str) -> None:
    model = onnx.load_model_from_string(models.linear().data)
    if field == "ir":
        model.ir_version = 99
    else:
        model.opset_import[0].version = 99
    with pytest.raises(InvalidModel, match=said) as caught:
        OnnxRuntimeEngine().load(Artifact.from_bytes(model.SerializeToString()), {})
    assert re.match(hint, caught.value.hint)
    assert "/onnxruntime_src/" not in str(caught.value)


def test_provider_that_this_build_lacks() -> None:
    options = {"providers": ["CPUExecutionProvider", "NoSuchProvider"]}
    (finding,) = OnnxRuntimeEngine().validate(models.linear(), options)
    assert finding.severity is Severity.ERROR
    with pytest.raises(InvalidConfig, match="NoSuchProvider.*available: .*CPUExecutionProvider"):
        OnnxRuntimeEngine().load(models.linear(), options)


@pytest.mark.parametrize(
    "options",
    [
        {"graph_level": "disabled"},
        {"graph_level": "basic"},
        {"graph_level": "extended"},
        {"arena": False},
        {"spinning": False},
        {"inter_op_threads": 2},
    ],
    ids=str,
)
def test_options_leave_answers_alone(options: dict[str, object]) -> None:
    model = OnnxRuntimeEngine().load(models.linear(), options)
    x = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(model.forward({"x": x})["y"], x @ models.linear_weight(), rtol=1e-5)


def test_graph_level_of_no_meaning() -> None:
    with pytest.raises(InvalidConfig, match="graph_level"):
        OnnxRuntimeEngine().load(models.linear(), {"graph_level": "most"})


def ml_model(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> Artifact:
    """A model with operators of ``ai.onnx.ml``."""
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return Artifact.from_bytes(
        helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString(), Format.ONNX
    )


def equal_texts() -> LoadedModel:
    """Compares the texts ``x`` and ``y``, element by element."""
    x, y, z = (helper.make_tensor_value_info(*value, ["N"]) for value in (("x", 8), ("y", 8), ("z", 9)))
    graph = helper.make_graph([helper.make_node("Equal", ["x", "y"], ["z"])], "g", [x, y], [z])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return OnnxRuntimeEngine().load(Artifact.from_bytes(proto.SerializeToString(), Format.ONNX), {})


EQUAL = equal_texts()


def test_text_that_is_not_utf8_reaches_the_model_as_bytes() -> None:
    encode = helper.make_node(
        "LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", keys_strings=["a", "bb"], values_int64s=[1, 2]
    )
    text, number = (helper.make_tensor_value_info(*value, ["N"]) for value in (("x", 8), ("y", 7)))
    model = OnnxRuntimeEngine().load(ml_model([encode], [text], [number]), {})
    elements = np.array([b"bb", b"\xff\xfe\xff", b"a", b""], np.object_)
    assert model.forward({"x": elements})["y"].tolist() == [2, -1, 1, -1]


@given(st.lists(st.tuples(*[st.binary(max_size=4)] * 2), min_size=1, max_size=20))
def test_elements_that_are_not_utf8_keep_their_ends(pairs: list[tuple[bytes, bytes]]) -> None:
    """ONNX Runtime reads elements of numpy's bytes type up to a zero byte, also beyond their ends."""
    pairs = [(one.replace(b"\0", b"\1"), other.replace(b"\0", b"\1")) for one, other in [*pairs, (b"\xff", b"\xff")]]
    x, y = (np.array(column, np.object_) for column in zip(*pairs, strict=True))
    assert EQUAL.forward({"x": x, "y": y})["z"].tolist() == [one == other for one, other in pairs]


def test_text_that_onnx_runtime_cannot_take_or_return() -> None:
    model = OnnxRuntimeEngine().load(models.identity(DataType.BYTES), {})
    with pytest.raises(
        InvalidArgument, match=r"outputs \['y'\] is not UTF-8.*send text, or the bytes as a UINT8 tensor"
    ):
        model.forward({"x": np.array([[b"\xff", b""]], np.object_)})
    for element in (b"a\0", b"a\0b", b"\0"):
        with pytest.raises(
            InvalidArgument, match="element 1 of input .* contains a zero byte.*send text, or the bytes as a UINT8"
        ):
            model.forward({"x": np.array([[b"\xff", element]], np.object_)})
    with pytest.raises(
        InvalidArgument, match="100001 elements are padded to 100001 bytes each, which exceeds the limit of 67108864"
    ):
        model.forward({"x": np.array([[b"\xff" * 100_000] + [b""] * 100_000], np.object_)})
    with pytest.raises(InvalidArgument, match="must be bytes or text, not int"):
        model.forward({"x": np.array([[1, b""]], np.object_)})


def test_a_classifier_with_zip_map_gives_labels_and_probabilities() -> None:
    linear = helper.make_node(
        "LinearClassifier", ["x"], ["label", "p"], domain="ai.onnx.ml", coefficients=[1.0, 0.0, 0.0, 1.0],
        intercepts=[0.0, 0.0], classlabels_ints=[7, 3], post_transform="SOFTMAX",
    )  # fmt: skip
    maps = helper.make_node("ZipMap", ["p"], ["probabilities"], domain="ai.onnx.ml", classlabels_int64s=[7, 3])
    kind = helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, []))
    outputs = [
        helper.make_tensor_value_info("label", 7, ["N"]),
        helper.make_value_info("probabilities", helper.make_sequence_type_proto(kind)),
    ]
    inputs = [helper.make_tensor_value_info("x", 1, ["N", 2])]
    model = OnnxRuntimeEngine().load(ml_model([linear, maps], inputs, outputs), {})
    assert model.signature.outputs[1] == TensorSpec("probabilities", DataType.FP32, (-1, -1))
    assert not model.left_out
    found = model.forward({"x": np.array([[9, 0], [0, 9], [9, 0]], np.float32)})
    assert found["label"].tolist() == [7, 3, 7]
    np.testing.assert_allclose(found["probabilities"], [[0, 1], [1, 0], [0, 1]], atol=1e-3)  # by label: 3, 7


def test_outputs_that_are_no_tensors_are_left_out() -> None:
    value = helper.make_tensor_value_info("x", 1, ["N"])
    sequence = helper.make_tensor_sequence_value_info("s", 1, ["N"])
    pair, relu = helper.make_node("SequenceConstruct", ["x", "x"], ["s"]), helper.make_node("Relu", ["x"], ["y"])
    whole = ml_model([pair, relu], [value], [sequence, helper.make_tensor_value_info("y", 1, ["N"])])
    model = OnnxRuntimeEngine().load(whole, {})
    assert model.left_out == {"s": "seq(tensor(float))"}
    assert model.forward({"x": np.array([-1, 2], np.float32)})["y"].tolist() == [0, 2]
    with pytest.raises(Unsupported, match=r"'s' is a seq\(tensor\(float\)\), which has no tensor datatype"):
        OnnxRuntimeEngine().load(ml_model([pair], [value], [sequence]), {})


@pytest.mark.parametrize(("datatype", "expected"), [(DataType.FP32, True), (DataType.BYTES, False)])
def test_how_long_it_takes_depends_on_shapes_but_for_texts(datatype: DataType, expected: bool) -> None:
    model = OnnxRuntimeEngine().load(models.identity(datatype), {})
    assert getattr(model, "predictable", False) is expected


def test_a_model_with_a_loop_takes_as_long_as_its_data_say() -> None:
    assert getattr(OnnxRuntimeEngine().load(models.count_to(), {}), "predictable", True) is False


def test_a_large_model_is_loaded_from_a_file_in_memory_that_does_not_stay_open(tmp_path: Path) -> None:
    large, before = models.linear(600, 600), len(os.listdir("/proc/self/fd"))
    assert large.size_bytes > 1 << 20
    model = OnnxRuntimeEngine().load(large, {"threads": 1})
    x = np.ones((2, 600), np.float32)
    np.testing.assert_allclose(model.forward({"x": x})["y"], x @ models.linear_weight(600, 600), rtol=1e-3, atol=1e-3)
    for broken in (large.data[:-1000], b"\xff" * (2 << 20)):
        (tmp_path / "broken.onnx").write_bytes(broken)
        with pytest.raises(InvalidModel, match="refuses the model") as caught:
            OnnxRuntimeEngine().load(Artifact.from_file(tmp_path / "broken.onnx"), {})
        assert "/proc/" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.BYTES])
def test_inputs_with_a_value_of_the_models_own_need_not_be_given(datatype: DataType) -> None:
    value = np.array([b"own" if datatype is DataType.BYTES else 3], datatype.dtype)
    stored = np.array(["own"], np.object_) if datatype is DataType.BYTES else value
    artifact = models.artifact(
        [("Identity", ["x"], ["y"]), ("Identity", ["w"], ["z"])],
        [("x", datatype.onnx, [1]), ("w", datatype.onnx, [1])],
        [("y", datatype.onnx, [1]), ("z", datatype.onnx, [1])],
        {"w": stored},
    )
    model = OnnxRuntimeEngine().load(artifact, {})
    assert isinstance(model, OnnxRuntimeModel)
    assert model.signature.input_names == ["x"]
    assert model.optional_inputs == (TensorSpec("w", datatype, (1,)),)
    other = np.array([b"other" if datatype is DataType.BYTES else 5], datatype.dtype)
    assert model.forward({"x": other})["z"] == value
    assert model.forward({"x": value, "w": other})["z"] == other


def test_the_engine_leaves_no_file_of_its_telemetry(tmp_path: Path) -> None:
    loads = "from penstock.engines.registry import get_engine; get_engine('onnxruntime')"
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([sys.executable, "-c", loads], env=environment | {"TMPDIR": str(tmp_path)}, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


_LARGE_RUN = """
import numpy as np, threading
from pathlib import Path
import models, penstock.tensor as tensor
from penstock.engines.onnxruntime import OnnxRuntimeEngine, trim_arena

def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

def watchers():
    return sum(thread.name == "arena" for thread in threading.enumerate())

model = OnnxRuntimeEngine().load(models.identity(tensor.DataType.FP32), {"threads": 1})
small, large = (np.ones((rows, 2), np.float32) for rows in (8, 8 << 20))
model.forward({"x": small})
before, first = resident(), watchers()
outputs = model.forward({"x": large})
read, second = resident(), watchers()
trim = lambda: trim_arena(model._session, model.signature.inputs)
trim()
held = resident()
assert outputs["y"][-1, 1] == 1
del outputs
dropped = resident()
trim()
assert model.forward({"x": small})["y"].tolist() == small.tolist()
print(first, second, read - before, held - before, dropped - before, resident() - before)
"""


def test_the_memory_of_a_large_run_is_given_back() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LARGE_RUN],
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(models.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    first, second, *memory = map(float, found.stdout.split())
    assert (first, second) == (0, 1)
    assert min(memory[:3]) > 48, memory  # also while an answer is unread, and after it is dropped
    assert memory[3] < 16, memory


@pytest.mark.parametrize("datatype", DataType, ids=lambda each: each.name)
def test_trimming_the_arena_runs_nothing(datatype: DataType) -> None:
    model = OnnxRuntimeEngine().load(models.identity(datatype), {})
    assert isinstance(model, OnnxRuntimeModel)
    ended: list[str] = []

    class Session:
        """Records how runs end."""

        def run(self, *arguments: Any, by: str = "run") -> None:
            with pytest.raises(Exception, match="terminate flag") as caught:
                getattr(model._session, by)(*arguments)
            ended.append(str(caught.value))

        def run_with_ort_values(self, *arguments: Any) -> None:
            self.run(*arguments, by="run_with_ort_values")

    trim_arena(Session(), model.signature.inputs)  # type: ignore[arg-type]
    assert len(ended) == 1


def _half_product(form: str) -> onnx.ModelProto:
    """A product in FP16 of a tensor with exchanged axes and a constant."""
    weight = np.linspace(-1, 1, 12).reshape(3, 4)
    constant = numpy_helper.from_array(weight.astype(np.float32 if form == "cast" else np.float16), "w")
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2])]
    if form == "cast":
        nodes.append(helper.make_node("Cast", ["w"], ["h"], to=onnx.TensorProto.FLOAT16))
    if form == "Constant":
        nodes.append(helper.make_node("Constant", [], ["w"], value=constant))
    nodes.append(helper.make_node("MatMul", ["t", "h" if form == "cast" else "w"], ["y"]))
    shapes = {"x": [2, 5, 3], "y": [5, 2, 4]}
    places = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", places[:1], places[1:], [] if form == "Constant" else [constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("form", ["initializer", "cast", "Constant"])
def test_graph_rewrites_of_products_in_fp16_do_not_end_the_process(form: str) -> None:
    """ONNX Runtime 1.31 segfaults while it loads such models, unless the engine switches off a rewrite."""
    artifact = Artifact.from_bytes(_half_product(form).SerializeToString())
    x = np.arange(30, dtype=np.float16).reshape(2, 5, 3) / 32
    wanted = x.transpose(1, 0, 2) @ np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_allclose(apart.forward(artifact, {"x": x}, as_written=False)["y"], wanted, 1e-2, 1e-2)
