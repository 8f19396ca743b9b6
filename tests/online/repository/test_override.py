"""Configurations and files that clients send to load a model."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Code, InvalidArgument, PenstockError
from penstock.online.repository.override import clear_abandoned, discard, read_parameters, store


def test_a_configuration_and_files() -> None:
    assert read_parameters("m", {}) == (None, {})
    assert read_parameters("m", {"config": "{}"}) == ("{}", {})
    parameters = {"config": "{}", "file:1/model.onnx": b"m", "file:labels.txt": b"l"}
    assert read_parameters("m", parameters) == ("{}", {"1/model.onnx": b"m", "labels.txt": b"l"})


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"file:1/model.onnx": b""}, "require its configuration too"),
        ({"config": 1}, "must be a string"),
        ({"config": "{}", "file:1/model.onnx": "text"}, "must contain bytes"),
        ({"configuration": "{}"}, "unknown parameter 'configuration'"),
        (
            {"config": "{}"} | {f"file:1/{number}": b"" for number in range(1001)},
            "there are 1001 files .* at most 1000 are allowed",
        ),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read_parameters("m", parameters)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../m",
        "1/../../m",
        "1/..",
        "1//m",
        "1/",
        "a\\b",
        "1/\0",
        ".hidden",
        "/".join("123456789"),
    ],
    ids=repr,
)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid path in the folder of model 'm'"):
        read_parameters("m", {"config": "{}", f"file:{path}": b""})


def test_a_name_that_no_file_can_have_is_a_failure_of_the_repository_as_clients_expect() -> None:
    with pytest.raises(PenstockError, match="failed to load 'm', failed to poll from model repository") as refusal:
        read_parameters("m", {"config": "{}", f"file:{'A' * 256}": b""})
    assert refusal.value.code is Code.INTERNAL


def test_files_are_kept_where_only_their_owner_can_read_them_until_discarded() -> None:
    folder = store({"1/model.onnx": b"m", "1/deep/weights": b"w"})
    assert (folder / "1/deep/weights").read_bytes() == b"w"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    discard(str(folder))
    assert not folder.exists()
    discard(str(folder))
    discard("")
    assert Path().exists()


_OTHER = """
import os, signal, sys
from penstock.online.repository.override import hold, store
assert hold(sys.argv[1]) if sys.argv[1:] else print(store({"1/m": b"x"}), flush=True) is None
print("held", flush=True)
signal.pause()
"""


class Other:
    """Another process that holds a folder, by default a new one."""

    def __init__(self, *folder: str) -> None:
        command = [sys.executable, "-c", _OTHER, *folder]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.folder = Path(folder[0] if folder else self._process.stdout.readline().strip())
        assert self._process.stdout.readline() == "held\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_goes_with_the_last_process_that_uses_it(temporary: Path) -> None:
    folder = store({"1/m": b"x"})
    other = Other(str(folder))
    discard(str(folder))
    assert (folder / "1/m").exists()
    other.kill()
    discard(str(folder))
    assert not folder.exists()


def test_what_a_killed_server_has_left_is_cleared_and_nothing_else(temporary: Path) -> None:
    other, own = Other(), store({"1/m": b"x"})
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (temporary / "penstock-model-abcdefgh").symlink_to(elsewhere)
    (temporary / "penstock-model-abcdefg1").write_text("a file")
    (temporary / "penstock-model-abcdefg2").mkdir(mode=0o755)
    (temporary / "penstock-model-zoo").mkdir(mode=0o700)
    before = set(temporary.iterdir())
    clear_abandoned()
    assert set(temporary.iterdir()) == before
    other.kill()
    clear_abandoned()
    assert set(temporary.iterdir()) == before - {other.folder}
    discard(str(own))


def test_a_file_that_is_the_folder_of_another_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InvalidArgument, match="the folder of another file"):
        store({"1": b"", "1/model.onnx": b""})
    assert not list(tmp_path.iterdir())
