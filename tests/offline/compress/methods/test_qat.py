from __future__ import annotations

from pathlib import Path

QUICK = ("--method", "min-max", "--placement", "linear", "--no-equalize", "--epochs", "1")


def test_trained_integers_and_a_checkpoint(penstock, digits: Path) -> None:
    arguments = ("qat", "model.onnx", "--train", "train.npz", *QUICK, "--resume", "kept", "--json")
    done = penstock(*arguments, "--evaluate", "test.npz", "--budget", "100ms", "-o", "int8.onnx")
    assert done.code == 0, done.err
    found = done.json
    assert found["size_ratio"] > 3
    assert found["accuracy_loss"] <= 0.01
    assert found["steps"][-1]["name"] == "qat"
    before, after = found["steps"][-1]["facts"]["held_out_loss"]
    assert found["kept"] == ("trained" if after < before else "start")
    assert ("accuracy" in found["short_of"]) == (found["kept"] == "start")
    assert len(list((digits / "kept").glob("training-*.kept"))) == 1
    # The same run goes on from its end: the same file, by the option's other name.
    again = penstock("qat", "model.onnx", "--calibrate", "train.npz", *arguments[4:], "-o", "again.onnx")
    assert again.code == 0, again.err
    assert (digits / "again.onnx").read_bytes() == (digits / "int8.onnx").read_bytes()
    other = penstock(*arguments[:-1], "--seed", "1", "-o", "other.onnx")
    assert other.code == 2
    assert "belongs to a run with other options" in other.err
