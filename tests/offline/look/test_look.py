"""Tests of penstock.offline.look.look on real models, and on files that were made to exhaust memory or time."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import input_models
import models
import saved_models
from penstock.artifact import Artifact, Format
from penstock.errors import InvalidModel, NotFound, Unsupported
from penstock.offline.look import look as module
from penstock.offline.look.look import look, make_template, next_command
from row_graphs import parsed

DATASETS = sorted(Path(onnxruntime.__file__).parent.glob("datasets/*.onnx"))


@pytest.fixture
def file(tmp_path: Path):
    def write(artifact: Artifact, name: str = "model.onnx") -> Path:
        path = tmp_path / name
        path.write_bytes(artifact.data)
        return path

    return write


def test_an_onnx_model(file) -> None:
    found = look(file(input_models.text_encoder(50)))
    facts = found.facts
    assert (facts.format, facts.parameters, facts.opsets) == ("onnx", 50 * 8 + 16 + 32, {"ai.onnx": 17})
    assert [one.role for one in facts.inputs] == ["token ids", "token types", "mask"]
    assert facts.inputs[0].meaning == "token ids 0 to 49 (index of a table of 50 rows)"
    assert facts.sample_shapes["input_ids"] == (1, 32)
    assert facts.sample_failure == ""
    runs = {engine.name: engine.runs for engine in facts.engines}
    assert runs["onnxruntime"]
    assert facts.cost.quantisable == 1
    assert 0 < facts.cost.share_of_weights < 1
    assert facts.notes == ()


def test_a_relative_path_is_found_from_the_current_folder(file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(models.linear(3, 2))
    look(path)  # starts the child process in another folder
    monkeypatch.chdir(path.parent)
    assert look(Path(path.name)).signature is not None


@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.name)
def test_real_models_are_understood_and_accept_the_sample(path: Path) -> None:
    found = look(path)
    assert not found.facts.sample_failure
    assert all(one.meaning for one in found.facts.inputs)
    assert found.facts.engines[0].runs
    assert make_template(found).keys() == {one.name for one in found.facts.inputs}


def test_a_voice_model_has_a_template_of_calls(file) -> None:
    found = look(file(input_models.voice_activity()))
    assert found.facts.sample_failure == ""
    assert not found.facts.has_rows
    made = make_template(found)
    assert {name: array.shape[1:] for name, array in made.items()} == {"input": (1, 512), "state": (2, 1, 8), "sr": ()}
    assert set(made["sr"].tolist()) <= {8000, 16000}


def test_a_template_has_several_rows_where_the_model_has_them(file) -> None:
    made = make_template(look(file(input_models.text_encoder(50))))
    assert {array.shape for array in made.values()} == {(4, 32)}


def test_the_sizes_are_those_that_the_model_accepts(file) -> None:
    body = "y = Reshape(x, s)"
    found = look(file(parsed(body, "float[N, L] x", "float[512] y", "int64[1] s = {512}")))
    assert found.facts.sample_shapes == {} or np.prod(found.facts.sample_shapes["x"]) == 512
    assert bool(found.facts.sample_failure) == (found.facts.sample_shapes == {})


def test_a_model_that_rejects_all_samples_says_why(file) -> None:
    found = look(file(parsed("y = Reshape(x, s)", "float[N, 5] x", "float[7, 1] y", "int64[2] s = {7, 1}")))
    assert "on x [1, 5]" in found.facts.sample_failure
    with pytest.raises(Unsupported, match="no samples can be made"):
        make_template(found)


def test_a_model_that_no_engine_loads_still_says_what_the_file_says(file) -> None:
    facts = look(file(models.unknown_operator())).facts
    assert facts.inputs
    assert facts.operators
    assert not any(engine.runs for engine in facts.engines)
    assert all(engine.reason for engine in facts.engines)
    assert facts.next_command == ""


def test_external_data(tmp_path: Path) -> None:
    path = models.external_linear(tmp_path)
    assert look(path).facts.engines[0].runs
    (tmp_path / "w.bin").unlink()
    facts = look(path).facts
    assert not facts.engines[0].runs
    assert facts.parameters == 6


@pytest.mark.parametrize(
    ("package", "zoo", "format"),
    [
        ("openvino", "openvino_models", "openvino_ir"),
        ("ai_edge_litert", "tflite_models", "tflite"),
        ("torch", "torch_models", "exported_program"),
    ],
)
def test_other_formats(package: str, zoo: str, format: str) -> None:
    pytest.importorskip(package)
    models = importlib.import_module(zoo)
    facts = look(getattr(models, "PROGRAMS", models).linear()).facts
    assert facts.format == format
    assert facts.operators
    assert [(one.name, one.datatype, one.shape) for one in facts.inputs] == [("x", "FP32", (-1, 3))]
    assert facts.engines[0].runs
    assert not facts.sample_failure
    assert facts.next_command.startswith("penstock serve ")


def test_a_script_says_why_no_engine_runs_it() -> None:
    pytest.importorskip("torch")
    import torch_models  # noqa: PLC0415 - the package is optional

    facts = look(torch_models.SCRIPTS.linear()).facts
    assert "none are declared" in facts.engines[0].reason
    assert facts.inputs[0].name == "x"


def test_a_model_that_ends_its_process_is_described_nevertheless(file) -> None:
    """ONNX Runtime 1.31 divides by the size of an axis; here the model itself makes it zero."""
    body = """
        none = Slice(x, zero, zero)
        y = Einsum<equation = "ia...,ja...->ij...">(none, none)
    """
    artifact = parsed(body, "float[N, M, K] x", "float[N, P, Q] y", "int64[1] zero = {0}")
    facts = look(file(artifact)).facts
    assert facts.operators == {"Einsum": 1, "Slice": 1}


def test_a_model_that_asks_for_much_memory_fails_alone(file) -> None:
    huge = helper.make_node("ConstantOfShape", ["size"], ["big"])
    artifact = input_models.built(
        [
            huge,
            helper.make_node("ReduceSum", ["big"], ["total"], keepdims=0),
            helper.make_node("Add", ["x", "total"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ["N", 2])],
        [("y", TensorProto.FLOAT, ["N", 2])],
        {"size": np.array([1 << 40], np.int64)},
    )
    facts = look(file(artifact)).facts
    assert facts.operators["ConstantOfShape"] == 1
    assert not facts.engines[0].runs or facts.sample_failure


def test_a_file_of_very_many_nodes_fails_alone(file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes of the file become hundreds of bytes in memory."""
    monkeypatch.setattr(module, "_LEAST_BYTES", 512 << 20)
    monkeypatch.setattr(module, "_COPIES", 0)
    monkeypatch.setattr(module, "_PATIENCE_S", 2.0)
    path = file(Artifact.from_bytes(b"\x3a\x80\x80\x80\x04" + b"\x0a\x00" * (1 << 22)))
    with pytest.raises(InvalidModel, match="cannot be read"):
        look(path)


def test_a_model_that_never_ends_is_stopped(file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 8.0)
    assert look(file(models.endless_on_zeros())).facts.sample_failure == ""
    model = onnx.load_model_from_string(models.endless_on_zeros().data)
    model.graph.node[0].input[0] = "nothing"
    model.graph.node.insert(0, helper.make_node("Sub", ["x", "x"], ["nothing"]))
    facts = look(file(Artifact.from_bytes(model.SerializeToString()), "endless.onnx")).facts
    assert facts.engines[0].runs
    assert "ran for more than" in facts.sample_failure
    assert facts.notes == ()


def test_a_file_with_an_output_of_unknown_shape_still_says_what_its_inputs_mean(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(saved_models.saved_model())
    facts = look(tmp_path).facts
    assert [one.role for one in facts.inputs] == ["tensor", "features"]
    assert facts.outputs[0].shape is None


def test_what_is_no_model(tmp_path: Path, file) -> None:
    with pytest.raises(NotFound, match="no model file"):
        look(tmp_path / "none.onnx")
    with pytest.raises(Unsupported, match="not a model file"):
        look(file(models.linear(), "model.txt"))
    with pytest.raises(Unsupported, match="runs only in a server"):
        look(file(models.linear(), "model.py"))
    with pytest.raises(InvalidModel, match=r"'broken.onnx' cannot be read: .*not an ONNX model"):
        look(file(Artifact.from_bytes(b"not a model"), "broken.onnx"))


def test_the_next_command_is_quoted() -> None:
    assert next_command(Format.ONNX, "m.onnx") == "penstock build m.onnx --synthetic -o m.bundle"
    evil = "a b; rm -rf $HOME.onnx"
    words = shlex.split(next_command(Format.ONNX, evil, "d 'x.npz"))
    assert words == ["penstock", "build", evil, "--calibrate", "d 'x.npz", "-o", "a b; rm -rf $HOME.bundle"]
    assert next_command(Format.TFLITE, "m.tflite") == "penstock serve m.tflite"


def test_a_model_in_memory_is_looked_into_like_its_file(file) -> None:
    artifact = models.linear()
    assert look(artifact, "model.onnx").facts == look(file(artifact), "model.onnx").facts
