"""The command ``penstock split``."""

from pathlib import Path

import onnx

from benchmarks.models import resnet18
from commands import Command
from penstock.offline.split import cut_tensors


def test_both_parts_are_written(penstock: Command, tmp_path: Path) -> None:
    model = resnet18(tmp_path / "resnet18.onnx", 64)
    cut = cut_tensors(onnx.load(model).graph)[-1]
    done = penstock("split", model, "--mbits", "10", "--at", cut, "-o", tmp_path / "parts", "--json")
    assert done.code == 0, done.err
    assert done.json["best"]["tensor"] == cut
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["head.onnx", "tail.onnx"]
    again = penstock("split", model, "--mbits", "10", "-o", tmp_path / "parts")
    assert again.code == 2
    assert "exists" in again.err


def test_nothing_is_written_if_one_side_is_faster(penstock: Command, tmp_path: Path) -> None:
    model = resnet18(tmp_path / "resnet18.onnx", 64)
    done = penstock("split", model, "--mbits", "0.01", "-o", tmp_path / "parts")
    assert done.code == 0, done.err
    assert "all on the device" in done.out
    assert "nothing written" in done.out
    assert not (tmp_path / "parts").exists()


def test_a_cut_that_does_not_exist_is_an_error(penstock: Command, tmp_path: Path) -> None:
    model = resnet18(tmp_path / "resnet18.onnx", 64)
    done = penstock("split", model, "--mbits", "10", "--at", "nothing", "-o", tmp_path / "parts")
    assert done.code == 2
    assert "'nothing'" in done.err
