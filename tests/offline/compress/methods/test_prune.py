from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from penstock.artifact import Artifact
from penstock.offline.compress.pruning.magnitude import sparsity

DIGITS = ("prune", "model.onnx")


def zeros(path: Path) -> float:
    found: float = sparsity(Artifact.from_file(path))["sparsity"]
    return found


def test_at_once(penstock, digits: Path) -> None:
    done = penstock(*DIGITS, "--sparsity", "70%", "-o", "pruned.onnx")
    assert done.code == 0, done.err
    assert zeros(digits / "pruned.onnx") == pytest.approx(0.7, abs=1e-4)
    assert "coded, KiB" in done.out
    assert "70.00% of 150432 weights are zero" in done.out


def test_layer_by_layer_with_a_picture(penstock, digits: Path) -> None:
    options = ("--per-layer", "--train", "train.npz", "--chart", "layers.svg", "--sparsity", "60%", "--json")
    done = penstock(*DIGITS, *options, "-o", "pruned.onnx")
    assert done.code == 0, done.err
    assert done.json["sparsity"] == pytest.approx(0.6, abs=0.01)
    assert done.json["steps"][-1]["options"]["rule"]["type"] == "layers"
    assert done.json["pays"] is True
    assert (digits / "layers.svg").read_text().count("<polyline") == 9


def test_a_pattern(penstock, folder: Path) -> None:
    (folder / "wide.onnx").write_bytes(models.linear(64, 32).data)
    done = penstock("prune", "wide.onnx", "--n-m", "2:4", "-o", "pruned.onnx", "--json")
    assert done.code == 0, done.err
    assert any("only engines with support for the pattern" in note for note in done.json["notes"])
    (weight,) = (onnx.numpy_helper.to_array(one) for one in onnx.load(folder / "pruned.onnx").graph.initializer)
    # Of each 4 inputs of every output 2 are left.
    assert (np.count_nonzero(weight.reshape(16, 4, 32), axis=1) == 2).all()


def test_step_by_step_and_again(penstock, digits: Path) -> None:
    options = ("--iterative", "--train", "train.npz", "--sparsity", "50%", "--levels", "2", "--epochs", "1")
    rest = ("--max-accuracy-loss", "10%", "--resume", "kept", "--chart", "levels.svg", "--json")
    done = penstock(*DIGITS, *options, *rest, "-o", "pruned.onnx")
    assert done.code == 0, done.err
    assert zeros(digits / "pruned.onnx") == pytest.approx(done.json["sparsity"], abs=1e-4)
    assert done.json["steps"][-1]["facts"]["loss"] <= 0.1
    assert ">iterative<" in (digits / "levels.svg").read_text()
    assert list((digits / "kept").glob("level-*.kept"))
    again = penstock(*DIGITS, *options, *rest, "-o", "again.onnx")
    assert again.code == 0, again.err
    assert (digits / "again.onnx").read_bytes() == (digits / "pruned.onnx").read_bytes()
    other = penstock(*DIGITS, *options, *rest, "--seed", "3", "-o", "again.onnx")
    assert (other.code, "holds a pruning run of another model" in other.err) == (2, True)


def test_a_contract_that_no_level_meets(penstock, folder: Path) -> None:
    """With 64 classes and 3 inputs, any pruning changes the class of some samples, and a tenth of an epoch does not restore it."""
    (folder / "classes.onnx").write_bytes(models.linear(3, 64).data)
    np.savez("classes.npz", x=np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32))
    options = ("--iterative", "--train", "classes.npz", "--levels", "1", "--epochs", "0.1", "--max-accuracy-loss", "0%")
    done = penstock("prune", "classes.onnx", *options, "-o", "out.onnx", "--json")
    assert done.code == 4, done.err
    assert "no level of pruning meets the contract" in done.err
    assert done.json["candidates"]
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--levels", "3"), "--levels requires --iterative"),
        (("--epochs", "3"), "--epochs requires --iterative"),
        (("--n-m", "4:2"), "'4:2' is not a pattern N:M"),
        (("--n-m", "half"), "'half' is not a pattern N:M"),
        (("--n-m", "2:4", "--sparsity", "50%"), "--n-m cannot be combined with --sparsity"),
        (("--iterative", "--per-layer", "--train", "data.npz"), "--iterative cannot be combined with --per-layer"),
        (("--per-layer",), "needs data"),
        (("--sparsity", "5"), "a fraction must be below 1 or end in %, got 5"),
        (("--skip", "none"), "no prunable weight(s) ['none']"),
    ],
)
def test_options_that_make_no_sense(penstock, folder: Path, options: tuple[str, ...], cause: str) -> None:
    done = penstock("prune", "linear.onnx", *options, "-o", "out.onnx")
    assert done.code == 2
    assert cause in done.err
    assert not (folder / "out.onnx").exists()
