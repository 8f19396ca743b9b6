from __future__ import annotations

from pathlib import Path

import pytest

DIGITS = ("prune-channels", "model.onnx")


def test_once_and_trained(penstock, digits: Path) -> None:
    arguments = ("--width", "75%", "--train", "train.npz", "--json")
    plain = penstock(*DIGITS, *arguments, "-o", "plain.onnx")
    assert plain.code == 0, plain.err
    assert plain.json["size_ratio"] > 1.4
    evaluated = ("--recover", "--epochs", "5", "--evaluate", "test.npz", "--budget", "100ms")
    done = penstock(*DIGITS, *arguments, *evaluated, "-o", "trained.onnx")
    assert done.code == 0, done.err
    assert [step["name"] for step in done.json["steps"]][-2:] == ["narrow", "recover"]
    # Five passes over 150 samples bring back most of what a quarter of the channels took.
    assert done.json["accuracy_loss"] < 0.15


def test_scales_are_looked_at_before_they_are_folded(penstock, digits: Path) -> None:
    done = penstock(*DIGITS, "--importance", "batch-norm", "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    assert [step["name"] for step in done.json["steps"]] == ["narrow"]
    assert "optimised first" not in done.err


@pytest.mark.parametrize("importance", ["activation", pytest.param("taylor", marks=pytest.mark.slow)])
def test_importance_by_data(penstock, digits: Path, importance: str) -> None:
    done = penstock(*DIGITS, "--importance", importance, "-o", "out.onnx")
    assert (done.code, f"--importance {importance} needs data" in done.err) == (2, True)
    done = penstock(*DIGITS, "--importance", importance, "--train", "train.npz", "-o", "out.onnx")
    assert done.code == 0, done.err


@pytest.mark.slow
def test_in_turn_until_it_is_fast_enough(penstock, digits: Path) -> None:
    options = ("--speedup", "1.2", "--recover", "--train", "train.npz", "--epochs", "10", "--max-accuracy-loss", "20%")
    done = penstock(*DIGITS, *options, "--resume", "kept", "-o", "out.onnx", "--json")
    assert done.code == 0, done.err
    facts = done.json["steps"][-1]["facts"]
    assert facts["reached"] or "speed" in done.json["short_of"]
    assert list((digits / "kept").glob("round-*.kept"))


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--epochs", "3"), "--epochs requires --recover"),
        (("--max-accuracy-loss", "1%"), "--max-accuracy-loss requires --recover"),
        (("--speedup", "0.5"), "--speedup must be greater than 1, got 0.5"),
        (("--width", "0%"), "--width must be greater than 0%, got 0%"),
        (("--recover", "--speedup", "2", "--width", "50%", "--train", "data.npz"), "--width cannot be combined"),
        ((), "no channels of the model can be cut"),
        ((), "give a model with inner layers whose channels can be cut"),
    ],
)
def test_options_that_make_no_sense(penstock, folder: Path, options: tuple[str, ...], cause: str) -> None:
    done = penstock("prune-channels", "linear.onnx", *options, "-o", "out.onnx")
    assert done.code == 2
    assert cause in done.err
    assert not (folder / "out.onnx").exists()
