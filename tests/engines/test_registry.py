from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.artifact import Artifact, Format
from penstock.engines.registry import (
    available_engines,
    engine_names,
    engine_title,
    engines_for,
    get_engine,
    is_available,
    traits,
)
from penstock.errors import EngineUnavailable, InvalidArgument, InvalidConfig

_PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "engines.md"


def test_default_engine_is_first_and_always_there() -> None:
    assert available_engines()[0] == "onnxruntime"


def test_available_engines_are_those_whose_package_is_installed() -> None:
    assert ("openvino" in available_engines()) == (importlib.util.find_spec("openvino") is not None)


@pytest.mark.parametrize("name", engine_names())
def test_engine_is_what_it_is_found_by(name: str) -> None:
    if not is_available(name):
        pytest.skip("not installed")
    engine = get_engine(name)
    assert engine.name == name
    assert engine.version
    assert engine.formats == {format for format in Format if name in engines_for(format)}


def test_titles_of_engines_are_for_people() -> None:
    assert [engine_title(name) for name in ("onnxruntime", "openvino", "tflite")] == [
        "ONNX Runtime",
        "OpenVINO",
        "TensorFlow Lite",
    ]
    assert len({engine_title(name) for name in engine_names()} - set(engine_names())) == len(engine_names())
    assert engine_title("npu") == "npu"


@pytest.mark.parametrize("name", engine_names())
def test_every_option_is_on_the_page(name: str) -> None:
    if not is_available(name):
        pytest.skip("not installed")
    module = sys.modules[type(get_engine(name)).__module__]
    (struct,) = [value for key, value in vars(module).items() if key.endswith("Options") and isinstance(value, type)]
    section = _PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    shown = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert shown == {field.name for field in msgspec.structs.fields(struct)}


@pytest.mark.parametrize("name", engine_names())
def test_its_names_and_formats_are_on_the_page(name: str) -> None:
    tables = _PAGE.read_text().split(f"\n## {engine_names()[0]}\n")[0]
    assert f"\n| `{name}` |" in tables
    rows = [line for line in tables.splitlines() if line.endswith(f"| `{name}` |")]
    for served in traits(name).served_as:
        words = [f"`{served.backend}`", f"`{served.platform}`", f"`{served.filename}`"]
        assert any(all(word in row for word in words) for row in rows), served


@pytest.mark.parametrize("name", engine_names())
def test_traits_say_what_the_engine_takes(name: str) -> None:
    if not is_available(name):
        pytest.skip("not installed")
    known, engine = traits(name), get_engine(name)
    assert known.class_name == type(engine).__name__
    assert engine.gpus() == 0 or known.gpu_options is not None
    options = {"inputs", "outputs"} if known.takes_signature else set()
    options |= {"threads", *known.shared_options, *(known.gpu_options(0) if known.gpu_options else ())}
    options |= {"precision"} if known.precisions else set()
    with pytest.raises(InvalidConfig) as caught:
        engine.validate(Artifact.from_bytes(b"", known.formats[0]), {"": 0})
    assert options <= set(caught.value.hint.removeprefix("use one of: ").split(", "))


def test_every_format_has_an_engine() -> None:
    assert all(engines_for(format) for format in Format if format is not Format.PYTHON)
    assert engines_for(Format.ONNX)[:2] == ["onnxruntime", "openvino"]


def test_unknown_engine_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match="unknown engine 'onxruntime'.*use one of: onnxruntime, torch, openvino"):
        get_engine("onxruntime")


def test_missing_package_is_one_error_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, "penstock.engines.openvino", raising=False)
    with pytest.raises(EngineUnavailable) as caught:
        get_engine("openvino")
    assert "engine 'openvino' is not available" in caught.value.message
    assert caught.value.hint == "pip install 'penstock[openvino]'"
    assert not is_available("openvino")
    assert "openvino" not in available_engines()


def test_an_engine_is_imported_only_when_asked_for() -> None:
    names = "{'onnxruntime', 'openvino', 'torch', 'ai_edge_litert', 'tensorflow'}"
    script = f"import sys; import penstock.engines.registry; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
