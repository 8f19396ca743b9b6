from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import models
from benchmarks.zoo.caffe import MODELS
from bundles import packed
from penstock.cli.flags.sources import is_source, runnable


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_runs_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "linear.onnx").write_bytes(models.linear(3, 2).data)
    bundle = packed(tmp_path / "linear.bundle", {"model.onnx": models.linear(3, 2).data})
    for path in (tmp_path / "linear.onnx", bundle, tmp_path / "absent.keras", tmp_path / "net.pt"):
        assert runnable(path) == path
    assert not is_source(bundle)


def test_other_sources_are_converted(tmp_path: Path) -> None:
    given = MODELS["embedding"].make(tmp_path)
    assert isinstance(given, Path)
    assert is_source(given)
    assert runnable(given).name == f"{given.stem}.onnx"
    assert is_source(Path("package.module:function"))


def test_commands_that_need_no_conversion_do_not_import_it() -> None:
    code = "import sys, penstock.cli.serve; print(any(name.startswith('penstock.offline') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
