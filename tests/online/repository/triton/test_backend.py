"""Which engine runs a model version, from its configuration or from its files."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidConfig, NotFound, Unsupported
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.triton.backend import backend_of, engine_options
from penstock.online.repository.triton.schema import typed
from penstock.online.repository.triton.text import parse_text


@pytest.mark.parametrize(
    ("file", "engine", "platform"),
    [
        ("model.onnx", "onnxruntime", "onnxruntime_onnx"),
        ("model.pt", "torch", "pytorch_libtorch"),
        ("model.pt2", "torch", "pytorch_export"),
        ("model.xml", "openvino", "openvino"),
        ("model.tflite", "tflite", "tensorflowlite"),
        ("model.savedmodel", "tensorflow", "tensorflow_savedmodel"),
        ("model.py", "python", "python"),
        ("model.bundle", "", "penstock_bundle"),
    ],
)
def test_from_the_files(file: str, engine: str, platform: str) -> None:
    found = backend_of(ModelConfig(), "m", [file, "labels.txt"])
    assert (found.engine, found.platform, found.filename) == (engine, platform, file)


@pytest.mark.parametrize(
    ("text", "files", "engine", "file"),
    [
        ('backend: "python"', ["model.onnx", "model.py"], "python", "model.py"),
        ('platform: "pytorch_libtorch"', ["model.pt", "model.onnx"], "torch", "model.pt"),
        ('backend: "armnn_tflite"', ["model.tflite"], "tflite", "model.tflite"),
        ('backend: "openvino"', ["model.onnx"], "openvino", "model.onnx"),
        ('default_model_filename: "net.onnx"', ["net.onnx", "model.py"], "onnxruntime", "net.onnx"),
        ('platform: "onnxruntime_onnx" default_model_filename: "weights"', ["weights"], "onnxruntime", "weights"),
        (
            "optimization { execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }",
            ["model.onnx"],
            "openvino",
            "model.onnx",
        ),
    ],
)
def test_from_the_configuration(text: str, files: list[str], engine: str, file: str) -> None:
    found = backend_of(typed(parse_text(text.encode(), "f")), "m", files)
    assert (found.engine, found.filename) == (engine, file)


@pytest.mark.parametrize(
    ("text", "files", "error", "reason"),
    [
        ("", [], NotFound, "contains no 'model.onnx' or .*the folder is empty"),
        ("", ["notes.txt"], NotFound, "it contains notes.txt"),
        ('backend: "pytorch"', ["model.onnx"], NotFound, "contains no 'model.pt' or 'model.pt2'"),
        ('backend: "tensorrt"', ["model.plan"], Unsupported, "'backend' is 'tensorrt'.*serve the ONNX model"),
        ('platform: "tensorflow_graphdef"', [], Unsupported, "SavedModel"),
        ('backend: "pytorhc"', ["model.pt"], InvalidConfig, "did you mean 'pytorch'"),
        ('backend: "python" platform: "onnxruntime_onnx"', ["model.py"], InvalidConfig, "contradict each other"),
    ],
)
def test_what_cannot_run(text: str, files: list[str], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=f"^model 'm': .*{reason}"):
        backend_of(typed(parse_text(text.encode(), "f")), "m", files)


def parameters(more: str = "", **values: str) -> ModelConfig:
    config = parse_text(more.encode(), "f")
    for key, value in values.items():
        config.parameters[key].string_value = value
    return typed(config)


def test_parameters_of_tritons_backends() -> None:
    given = parameters(
        "optimization { graph { level: -1 } }",
        intra_op_thread_count="2",
        execution_mode="1",
        inter_op_thread_count="3",
        enable_mem_arena="0",
        mine="kept",
    )
    assert engine_options(given, "m", "onnxruntime") == {
        "threads": 2,
        "inter_op_threads": 3,
        "graph_level": "basic",
        "arena": False,
    }
    assert engine_options(parameters(inter_op_thread_count="3"), "m", "onnxruntime") == {}
    assert engine_options(parameters(INFERENCE_NUM_THREADS="4", ENFORCE_BF16="YES"), "m", "openvino") == {
        "threads": 4,
        "precision": "bf16",
    }
    assert engine_options(parameters(INTRA_OP_THREAD_COUNT="4", INFERENCE_MODE="true"), "m", "torch") == {"threads": 4}
    assert engine_options(given, "m", "python") == {}


def test_a_parameter_that_is_no_number() -> None:
    with pytest.raises(InvalidConfig, match=r"^model 'm': 'parameters\[intra_op_thread_count\]' is '-1'"):
        engine_options(parameters(intra_op_thread_count="-1"), "m", "onnxruntime")
