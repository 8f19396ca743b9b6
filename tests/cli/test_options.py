"""The options and arguments that several commands share mean the same in each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import models
from bundles import packed
from commands import Command

DATA = ("--evaluate", "data.npz")
WRITERS = [
    ("build", "linear.onnx", "--evaluate", "data.npz", "--budget", "0", "-o"),
    ("compress", "linear.onnx", "--train", "data.npz", "--budget", "0", "-o"),
    ("quantize", "linear.onnx", "--calibrate", "data.npz", "-o"),
    ("infer", "linear.onnx", "--inputs", "data.npz", "--outputs"),
    ("sensitivity", "linear.onnx", "--calibrate", "data.npz", "--report"),
    ("inspect", "linear.bundle", "--report"),
    ("build", "linear.onnx", "--evaluate", "data.npz", "-o", "out.bundle", "--report"),
]
READERS = [
    ("build", "{}", *DATA, "-o", "out.bundle"),
    ("compress", "{}", "--train", "data.npz", "-o", "out.bundle"),
    ("quantize", "{}", "--calibrate", "data.npz", "-o", "out.onnx"),
    ("distill", "--student", "{}", "--teacher", "linear.onnx", "--train", "data.npz", "-o", "out.onnx"),
    ("infer", "{}", "--inputs", "data.npz"),
    ("serve", "{}", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
]
BUILDERS = READERS[:4]


@pytest.fixture
def bundle(folder: Path) -> Path:
    return packed(folder / "linear.bundle", {"model.onnx": models.linear(3, 2).data})


@pytest.mark.parametrize("arguments", WRITERS, ids=lambda given: f"{given[0]} {given[-1]}")
def test_a_missing_folder_is_named_before_any_work(
    penstock: Command, folder: Path, bundle: Path, arguments: tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    done = penstock(*arguments, "new/deep/out.onnx")
    assert done.code == 3
    assert done.err == (
        "error: the folder 'new/deep' for 'out.onnx' does not exist\n  fix: create it, or use --parents\n"
    )
    assert sorted(folder.rglob("*")) == before


def test_parents_makes_the_folder(penstock: Command, folder: Path, bundle: Path) -> None:
    assert penstock("inspect", "linear.bundle", "--report", "new/deep/report.html", "--parents").code == 0
    assert (folder / "new/deep/report.html").is_file()
    assert penstock("prune", "linear.onnx", "--sparsity", "50%", "-o", "other/out.onnx", "--parents").code == 0
    assert (folder / "other/out.onnx").is_file()


@pytest.mark.parametrize("arguments", READERS, ids=lambda given: given[0])
def test_every_command_refuses_an_unknown_file_in_the_same_words(
    penstock: Command, folder: Path, arguments: tuple[str, ...]
) -> None:
    np.savez("odd.npz", x=np.ones(3))
    (folder / "model.h5").write_bytes(b"keras")
    (folder / "pipeline.yaml").write_text("name: digits")
    causes = {
        "model.h5": "is a text, not a model",
        "odd.npz": "contains arrays, not a model",
        "pipeline.yaml": "is the declaration of a pipeline, not a bundle or a model",
    }
    for name, cause in causes.items():
        done = penstock(*(part.format(name) for part in arguments))
        assert done.code == 2
        assert f"error: '{name}' {cause}\n  fix: " in done.err


@pytest.mark.parametrize("arguments", BUILDERS, ids=lambda given: given[0])
@pytest.mark.parametrize("name", ["m.tflite", "m.pt", "m.pt2", "m.xml", "m.py"])
def test_every_builder_refuses_a_source_that_is_no_model_in_the_same_words(
    penstock: Command, folder: Path, arguments: tuple[str, ...], name: str
) -> None:
    (folder / name).write_bytes(b"model")
    done = penstock(*(part.format(name) for part in arguments))
    assert done.code == 2
    assert f"error: '{name}' is a text, not a model" in done.err


def test_a_folder_of_an_onnx_model_is_read_by_every_builder(penstock: Command, folder: Path) -> None:
    (folder / "large.onnx").mkdir()
    (folder / "large.onnx" / "model.onnx").write_bytes(models.linear(3, 2).data)
    for number, (command, *arguments) in enumerate(BUILDERS[:3]):
        budget = () if command == "quantize" else ("--budget", "1s")
        given = (part.format("large.onnx").replace("out", f"out{number}") for part in arguments)
        done = penstock(command, *given, *budget)
        assert done.code == 0, done.err
