from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from conformance.engines import OnnxConformance
from penstock.artifact import Artifact
from penstock.engines.base import Severity
from penstock.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeModel
from penstock.errors import InvalidArgument, InvalidConfig, InvalidModel
from penstock.tensor import DataType, TensorSpec


class TestConformance(OnnxConformance):
    engine = OnnxRuntimeEngine()


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


def test_text_input_must_be_utf8() -> None:
    model = OnnxRuntimeEngine().load(models.identity(DataType.BYTES), {})
    with pytest.raises(InvalidArgument, match="input 'x' contains bytes that are not UTF-8"):
        model.forward({"x": np.array([[b"\xff", b""]], np.object_)})
    with pytest.raises(InvalidArgument, match="must be bytes or text, not int"):
        model.forward({"x": np.array([[1, b""]], np.object_)})


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
