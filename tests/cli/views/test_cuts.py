from __future__ import annotations

from pathlib import Path

import onnx

import models
from benchmarks.models import resnet18
from commands import Command
from penstock.offline.split import cut_tensors


def test_the_cuts_of_a_model_are_listed(penstock: Command, tmp_path: Path) -> None:
    model = resnet18(tmp_path / "resnet18.onnx", 64)
    expected = cut_tensors(onnx.load(model).graph)
    done = penstock("inspect", model, "--cuts", "--json")
    assert [cut["name"] for cut in done.json["cuts"]] == expected
    lines = penstock("inspect", model, "--cuts").out.splitlines()
    assert all(f"cut   {name} FP32[" in line for name, line in zip(expected, lines, strict=False))
    command = lines[-1].removeprefix("next  penstock ").split()
    done = penstock(*command[:-1], str(tmp_path / "parts"))
    assert done.code == 0, done.err
    assert (tmp_path / "parts" / "head.onnx").is_file()


def test_models_that_cannot_be_split(penstock: Command, folder: Path) -> None:
    (folder / "one.onnx").write_bytes(models.linear(3, 2).data)
    done = penstock("inspect", "one.onnx", "--cuts")
    assert "cannot be split" in done.out
    assert penstock("inspect", "one.onnx", "--cuts", "--report", "a.html").code == 2
    assert penstock("inspect", "none.onnx", "--cuts").code == 3
