"""Operators in Python: functions of ``register_op`` that ONNX Runtime calls."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import models
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.custom_ops import OperatorFailed, files, register_op, run_file
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import EngineUnavailable, InvalidArgument, InvalidModel
from penstock.tensor import DataType

OPTIONS = {"threads": 1, "spinning": False}
X = np.arange(6, dtype=np.float32).reshape(2, 3)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
TYPES = ["float32", "float64", "bool", "str", *INTEGERS]


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})
    monkeypatch.setattr("penstock.engines.custom_ops._files", {})


@pytest.fixture
def extensions() -> None:
    pytest.importorskip(
        "penstock.engines.extensions", exc_type=ImportError, reason="the extra penstock[extensions] is not installed"
    )


def artifact(operator: str, kind: DataType = DataType.FP32) -> Artifact:
    """A model that calls an operator once. Its namespace has the same name, because only new namespaces can get operators."""
    x, y = (helper.make_tensor_value_info(name, kind.onnx, ["N", None]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=operator)], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(operator, 1)]
    return Artifact.from_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def loaded(operator: str, function: Callable[..., Any], kind: Any = "float32") -> LoadedModel:
    register_op(f"{operator}::{operator}", form="python", inputs=[kind], outputs=[kind])(function)
    return OnnxRuntimeEngine().load(artifact(operator, DataType.from_numpy(np.dtype(kind))), OPTIONS)


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_passes_unchanged(kind: str, rows: int) -> None:
    rng = np.random.default_rng(0)
    given = np.frombuffer(rng.bytes(rows * 24), "int8" if kind in ("bool", "str") else kind).reshape(
        rows, -1 if rows else 3
    )
    if kind == "bool":
        given = given > 0
    if kind == "str":
        given = np.array([["", "a", "ä\n"]] * rows, np.object_).reshape(rows, 3)
    seen = []

    def same(x: np.ndarray) -> np.ndarray:
        seen.append(x)
        return x

    (found,) = loaded(f"same_{kind}", same, kind).forward({"x": given}).values()
    expected = np.array([[text.encode() for text in row] for row in given], np.object_) if kind == "str" else given
    np.testing.assert_array_equal(found, expected.reshape(given.shape))
    assert found.dtype == DataType.from_numpy(np.dtype(kind)).dtype
    assert seen[0].shape == given.shape


@pytest.mark.parametrize("kind", ["float16", "complex64", "no type"])
def test_types_for_which_the_package_ends_the_process_are_refused(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=kind):
        register_op("test::f", form="python", inputs=["float32"], outputs=[kind])


@pytest.mark.parametrize(
    "options", [{"form": "python"}, {"inputs": ["float32"]}, {"form": "onnx", "outputs": ["bool"]}]
)
def test_types_are_given_with_the_form_python_and_only_then(options: Any) -> None:
    with pytest.raises(InvalidArgument, match="types of inputs"):
        register_op("test::f", **options)


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fail_without_words(x: np.ndarray) -> np.ndarray:
    raise Wordless


@pytest.mark.usefixtures("extensions")
def test_text_with_a_zero_byte_is_refused() -> None:
    model = loaded("zero_byte", lambda x: np.array([["a\0b"]], np.object_), "str")
    with pytest.raises(OperatorFailed, match="zero byte"):
        model.forward({"x": np.array([[b"a"]], np.object_)})


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x / [], r"raised ValueError: .*\(test_extensions.py:\d+\)"),
        (lambda: 0, "raised TypeError"),
        (lambda x: sys.exit(), "raised SystemExit"),
        (lambda x: x.astype(np.float64), "returned float64, but declares FP32"),
        (lambda x: (x, x), "returned float32, float32, but declares FP32"),
        (lambda x: None, "returned object, but declares FP32"),
        (fail_without_words, r"raised Wordless \(test_extensions.py:\d+\)"),
    ],
)
def test_a_function_that_fails_is_named_and_the_model_still_runs(function: Any, message: str) -> None:
    model = loaded("fails", function)
    for call in (lambda: model.forward({"x": X}), lambda: model.forward_within({"x": X}, 60)):
        with pytest.raises(OperatorFailed, match=f"the operator 'fails::fails' {message}"):
            call()
    register_op("fails::fails", form="python", inputs=["float32"], outputs=["float32"])(lambda x: x + 1)
    second = OnnxRuntimeEngine().load(artifact("fails"), OPTIONS)
    np.testing.assert_array_equal(second.forward({"x": X})["y"], X + 1)
    with pytest.raises(OperatorFailed, match=message):  # a second definition is for models that are loaded later
        model.forward({"x": X})


@pytest.mark.usefixtures("extensions")
def test_an_operator_of_a_used_namespace_is_refused() -> None:
    model = loaded("late", lambda x: x)
    register_op("late::later", form="python", inputs=["float32"], outputs=["float32"])(lambda x: x)
    OnnxRuntimeEngine().load(artifact("late"), OPTIONS)  # it does not need the new operator
    with pytest.raises(InvalidArgument, match="'late::late' was registered after a model"):
        loaded("late", lambda x: x, "float64")
    assert not model.reentrant


@pytest.mark.usefixtures("extensions")
def test_failures_of_two_threads_do_not_mix() -> None:
    together = threading.Barrier(2, timeout=30)

    def meet(x: np.ndarray) -> np.ndarray:
        together.wait()
        if x[0, 0]:
            raise ValueError("odd")
        return x

    found: dict[float, str] = {}

    def run(value: float) -> None:
        try:
            models_by_value[value].forward({"x": np.full((1, 1), value, np.float32)})
            found[value] = ""
        except OperatorFailed as error:
            found[value] = error.message

    models_by_value = {value: loaded("meets", meet) for value in (0.0, 1.0)}
    threads = [threading.Thread(target=run, args=(value,)) for value in models_by_value]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0.0] == ""
    assert "odd" in found[1.0]


def test_without_the_file_the_operator_and_the_option_are_named() -> None:
    with pytest.raises(InvalidModel, match="needs the operator 'absent::absent'") as caught:
        OnnxRuntimeEngine().load(artifact("absent"), OPTIONS)
    assert "--ops" in caught.value.hint


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    monkeypatch.delitem(sys.modules, "penstock.engines.extensions", raising=False)
    monkeypatch.delattr("penstock.engines.extensions", raising=False)
    with pytest.raises(EngineUnavailable, match="onnxruntime-extensions") as caught:
        loaded("absent", lambda x: x)
    assert "penstock[extensions]" in caught.value.hint


@pytest.mark.usefixtures("extensions")
def test_child_processes_keep_the_fast_protobuf() -> None:
    """The package sets this variable, with which Penstock's messages cannot be read."""
    assert "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" not in os.environ


@pytest.mark.usefixtures("extensions")
def test_other_models_stay_reentrant() -> None:
    register_op("test::f", form="python", inputs=["float32"], outputs=["float32"])(lambda x: x)
    model = OnnxRuntimeEngine().load(models.linear(), OPTIONS)
    assert model.reentrant
    assert model.predictable


def test_files_that_ran_are_known(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "bad.py").write_text("1 / 0")
    run_file(tmp_path / "good.py")
    with pytest.raises(InvalidArgument):
        run_file(tmp_path / "bad.py")
    assert files() == (str((tmp_path / "good.py").resolve()),)


@pytest.mark.parametrize(
    "text",
    [
        "class Wordless(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Wordless",
        "import sys\nsys.path = []\n1 / 0",
    ],
)
def test_a_file_that_hides_its_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(InvalidArgument, match=r"'bad.py' raised (Wordless|ZeroDivisionError)"):
        run_file(tmp_path / "bad.py")
