"""Fixtures: the command ``penstock``, run in this process as the console script runs it, and folders to run it in."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import models
from penstock.cli.main import run


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        found = json.loads(self.out.splitlines()[-1])
        assert isinstance(found, dict)
        return found


Command = Callable[..., Outcome]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        code = ended.value.code
        written = capsys.readouterr()
        return Outcome(code if isinstance(code, int) else int(code is not None), written.out, written.err)

    return command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``linear.onnx`` (x [N, 3] to y [N, 2]) and ``data.npz`` with twenty labelled samples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear.onnx").write_bytes(models.linear(3, 2).data)
    x = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=(x @ models.linear_weight(3, 2)).argmax(axis=1))
    return tmp_path


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the digits example: ``model.onnx``, ``train.npz`` (150 labelled samples), ``test.npz`` (400)."""
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[1] / "examples" / "digits"
    shutil.copyfile(example / "model.onnx", tmp_path / "model.onnx")
    for source, name, count in (("calibrate.npz", "train.npz", 150), ("evaluate.npz", "test.npz", 400)):
        with np.load(example / source) as data:
            np.savez(tmp_path / name, **{key: data[key][:count] for key in data.files})
    return tmp_path
