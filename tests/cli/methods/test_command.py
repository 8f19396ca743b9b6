"""The common behaviour of the commands of single methods, tested with the fast ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock import open as open_model
from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.testing import assert_tensors_close

TRAINING = {
    "qat": ("--train", "data.npz"),
    "prune": ("--iterative", "--train", "data.npz"),
    "prune-channels": ("--recover", "--train", "data.npz"),
    "low-rank": ("--recover", "--train", "data.npz"),
    "share": ("--tune", "--train", "data.npz"),
}


def bad_files(folder: Path) -> None:
    with np.load("data.npz") as data:
        x, labels = data["x"], data["labels"]
    np.savez("named.npz", y=x)
    np.savez("shaped.npz", x=x[:, :2])
    np.savez("typed.npz", x=x.astype(np.float64))
    np.savez("nan.npz", x=np.where(np.arange(3) == 1, np.nan, x).astype(np.float32))
    np.savez("empty.npz", x=x[:0])
    np.savez("classes.npz", x=x, labels=labels + 7)
    np.savez("plain.npz", x=x)
    (folder / "text.onnx").write_text("no model")
    (folder / "text.npz").write_text("no data")
    (folder / "notes.onnx").write_text("mine")


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (("none.onnx",), 3, "no model file 'none.onnx'"),
        (("data.npz",), 2, "contains arrays, not a model"),
        (("text.onnx",), 2, "model 'text.onnx': the file is not an ONNX model"),
        (("folder.onnx",), 3, "no model file 'folder.onnx/model.onnx'"),
        (("some.coded",), 2, "penstock share some.coded --decode"),
        (("linear.onnx", "-o", "pipe.onnx"), 2, "'pipe.onnx' cannot be written: it is not a regular file"),
        (("linear.onnx", "--chart", "/dev/zero", "--train", "data.npz"), 2, "it is not a regular file"),
        (("linear.onnx", "--sparsity", "100%"), 2, "--sparsity must be at most 99%, got 100%"),
        (("linear.onnx", "--evaluate", "none.npz"), 3, "no data file 'none.npz'"),
        (("linear.onnx", "--evaluate", "text.npz"), 2, "'text.npz': it is not an npz file"),
        (("linear.onnx", "--evaluate", "linear.onnx"), 2, "cannot read 'linear.onnx'"),
        (("linear.onnx", "--evaluate", "named.npz"), 2, "no array for input(s) ['x']"),
        (("linear.onnx", "--evaluate", "shaped.npz"), 2, "has shape"),
        (("linear.onnx", "--evaluate", "typed.npz"), 2, "the data is float64"),
        (("linear.onnx", "--evaluate", "nan.npz"), 2, "contains NaN or infinity"),
        (("linear.onnx", "--evaluate", "empty.npz"), 2, "has no samples"),
        (("linear.onnx", "--evaluate", "classes.npz"), 2, "on samples of 'classes.npz'"),
        (("linear.onnx", "-o", "linear.onnx"), 2, "would overwrite"),
        (("linear.onnx", "-o", "out.txt"), 2, "must end in .onnx, got 'out.txt'"),
        (("linear.onnx", "-o", "notes.onnx"), 8, "'notes.onnx' exists and is not an ONNX file"),
        (("linear.onnx", "-o", "folder.onnx"), 2, "'folder.onnx' cannot be written"),
        (("linear.onnx", "-o", "data.npz/out.onnx"), 2, "cannot be written"),
        (("linear.onnx", "--threads", "4096"), 2, "4096 threads were requested"),
        (("linear.onnx", "--budget", "soon"), 2, "'soon' is not a time"),
        (("linear.onnx", "--chart", "notes.onnx", "--train", "data.npz"), 8, "is not a picture"),
        (("linear.onnx", "--chart", "out.onnx", "--train", "data.npz"), 2, "would overwrite"),
    ],
)
def test_mistakes_are_told_before_any_work(
    penstock, folder: Path, arguments: tuple[str, ...], code: int, cause: str
) -> None:
    bad_files(folder)
    (folder / "folder.onnx").mkdir()
    (folder / "some.coded").write_bytes(coded.encode((folder / "linear.onnx").read_bytes()))
    os.mkfifo("pipe.onnx")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    target = () if "-o" in arguments else ("-o", "out.onnx")
    done = penstock("prune", *arguments, *target, "--json")
    assert done.code == code, done.err
    assert cause in done.err
    assert "  fix: " in done.err
    assert "Traceback" not in done.err
    assert done.json["error"]["message"] in done.err
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(("command", "options"), TRAINING.items())
def test_no_epochs_no_data_or_no_folder_for_checkpoints(
    penstock, folder: Path, command: str, options: tuple[str, ...]
) -> None:
    base = (command, "linear.onnx", "-o", "out.onnx")
    for epochs in ("0", "-1", "nan", "inf"):
        done = penstock(*base, *options, f"--epochs={epochs}")
        assert (done.code, "--epochs must be" in done.err) == (2, True), done.err
    done = penstock(*base, *options[:-2])
    assert (done.code, "needs data" in done.err) == (2, True), done.err
    if command != "share":
        done = penstock(*base, *options, "--resume", "data.npz")
        assert (done.code, "is not a folder" in done.err) == (2, True), done.err
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize("command", [*TRAINING, "distill"])
def test_without_torch_nothing_is_begun(penstock, folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "penstock.offline.compress.training.torch", raising=False)
    for module in [name for name in sys.modules if name.startswith("penstock.offline.compress.training.")]:
        monkeypatch.delitem(sys.modules, module)
    model = ("--student", "linear.onnx", "--teacher", "linear.onnx") if command == "distill" else ("linear.onnx",)
    done = penstock(command, *model, *TRAINING.get(command, ("--train", "data.npz")), "-o", "out.onnx")
    assert done.code == 6
    assert done.err == "error: engine 'torch' is not available\n  fix: pip install 'penstock[torch]'\n"
    assert not (folder / "out.onnx").exists()


def test_what_is_written_runs_and_the_object_tells_of_it(penstock, folder: Path) -> None:
    arguments = ("prune", "linear.onnx", "--sparsity", "50%", "--evaluate", "data.npz", "--budget", "50ms")
    done = penstock(*arguments, "-o", "new/out.onnx", "--parents", "--json")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    found, written = done.json, (folder / "new" / "out.onnx").read_bytes()
    assert found["made"]["size_bytes"] == len(written)
    assert found["made"]["digest"] == Artifact.from_bytes(written).digest
    assert found["original"]["accuracy"] == 1.0
    assert found["metric"] == "top-1"
    assert found["samples"] == 20
    assert found["accuracy_loss"] == pytest.approx(1 - found["made"]["accuracy"])
    assert [step["name"] for step in found["steps"]] == ["optimize", "prune"]
    assert found["sparsity"] == 0.5
    weights = onnx.numpy_helper.to_array(onnx.load_from_string(written).graph.initializer[0])
    assert (weights == 0).sum() == 3
    assert [path.name for path in (folder / "new").iterdir()] == ["out.onnx"]
    # Again over itself, without --force; and the same bytes.
    assert penstock(*arguments[:-4], "-o", "new/out.onnx").code == 0
    assert (folder / "new" / "out.onnx").read_bytes() == written


def test_few_samples_are_told(penstock, folder: Path) -> None:
    with np.load("data.npz") as data:
        np.savez("two.npz", x=data["x"][:2])
    for data, few in (("two.npz", True), ("data.npz", False)):
        done = penstock("prune", "linear.onnx", "--sparsity", "50%", "--train", data, "-o", "out.onnx")
        assert (done.code, f"warning: '{data}' has only" in done.err) == (0, few), done.err
    assert "optimised first" not in done.err  # nothing was there to optimise


def test_force_writes_over_what_is_not_a_model(penstock, folder: Path) -> None:
    (folder / "out.onnx").write_text("mine")
    assert penstock("prune", "linear.onnx", "-o", "out.onnx", "--sparsity", "50%", "--force").code == 0
    onnx.checker.check_model(onnx.load(folder / "out.onnx"))


def test_labels_may_be_left_out(penstock, folder: Path) -> None:
    bad_files(folder)
    arguments = ("prune", "linear.onnx", "--sparsity", "50%", "--evaluate", "plain.npz", "--budget", "50ms")
    assert penstock(*arguments, "-o", "out.onnx", "--json").json["metric"] == "fidelity"


def test_an_interrupt_leaves_nothing(digits: Path) -> None:
    arguments = ["prune", "model.onnx", "--iterative", "--train", "train.npz", "--sparsity", "50%", "--resume", "kept"]
    options = ["--levels", "100", "--epochs", "1", "--max-accuracy-loss", "90%", "-o", "out.onnx", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as running:
        deadline = time.monotonic() + 60
        while not list(digits.glob("kept/level-*.kept")) and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert '"CANCELLED"' in out.splitlines()[-1]
    assert "Traceback" not in err
    assert not list(digits.glob("*.partial"))
    assert not (digits / "out.onnx").exists()


def test_the_unchanged_half_of_a_model_stays(penstock, folder: Path) -> None:
    """If nothing is pruned, the written model gives the outputs of the original."""
    assert penstock("prune", "linear.onnx", "--sparsity", "0", "-o", "out.onnx").code == 0
    with np.load("data.npz") as data:
        x = data["x"]
    with open_model("linear.onnx") as before, open_model("out.onnx") as after:
        assert_tensors_close(after.infer_rows({"x": x}), before.infer_rows({"x": x}))
