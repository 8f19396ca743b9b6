from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.artifact import Artifact, Format
from penstock.errors import InvalidModel, Unavailable
from penstock.online.instances.python.module import MODULE, import_model, in_brief, model_errors, reason, source_file


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def written(folder: Path, text: str) -> Artifact:
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(text)
    return Artifact.from_file(version / "model.py")


def test_modules_of_the_version_and_of_the_model_can_be_imported(tmp_path: Path) -> None:
    artifact = written(tmp_path, "import a_of_version, b_of_model\nsum = a_of_version.x + b_of_model.x")
    (tmp_path / "m" / "1" / "a_of_version.py").write_text("x = 1")
    (tmp_path / "m" / "b_of_model.py").write_text("x = 2")
    module = import_model(artifact)
    assert module.sum == 3
    assert module.__file__ == str(tmp_path / "m" / "1" / "model.py") == source_file(artifact)
    assert sys.modules[MODULE] is module


def test_a_model_without_a_file_runs_too() -> None:
    artifact = Artifact.from_bytes(b"x = 5", Format.PYTHON)
    assert import_model(artifact).x == 5
    assert source_file(artifact) == "<model.py>"


def failing(artifact: Artifact) -> InvalidModel:
    with pytest.raises(InvalidModel) as caught, model_errors(source_file(artifact), "while it was imported"):
        import_model(artifact)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("import json\n\njson.loads('{')", 3, "JSONDecodeError"),
        ("x = 1\ny = x.z", 2, "AttributeError: 'int' object has no attribute 'z'"),
        ("x = 1\nif x", 2, "SyntaxError"),
        ("raise SystemExit(3)", 1, "SystemExit: 3"),
    ],
)
def test_errors_name_the_models_own_line(text: str, line: int, what: str, tmp_path: Path) -> None:
    error = failing(written(tmp_path, text))
    assert f"model.py failed in line {line} while it was imported" in error.message
    assert what in error.message
    assert "Traceback" not in error.message


def test_errors_of_ours_pass_unchanged() -> None:
    error = Unavailable("not now")
    with pytest.raises(Unavailable) as caught, model_errors("model.py", "while"):
        raise error
    assert caught.value is error


def test_reasons_are_one_short_line() -> None:
    assert reason(ValueError("two\n  lines")) == "ValueError: two lines"
    noted = ValueError("x")
    noted.add_note("a note")
    assert reason(noted) == "ValueError: x"
    assert len(in_brief("word " * 1000)) == 500
    assert in_brief("word " * 1000).endswith("…")
