from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from penstock.artifact import Artifact

COMMON = ("distill", "--teacher", "linear.onnx", "--train", "data.npz")


@pytest.fixture
def student(folder: Path) -> Path:
    """``student.onnx``, with the teacher's architecture and other weights."""
    (folder / "student.onnx").write_bytes(models.linear(3, 2, seed=1).data)
    return folder


def test_a_student_learns_the_teachers_answers(penstock, student: Path) -> None:
    options = ("--student", "student.onnx", "--evaluate", "data.npz", "--budget", "50ms", "--epochs", "100", "--json")
    done = penstock(*COMMON, *options, "--resume", "kept", "-o", "out.onnx")
    assert done.code == 0, done.err
    found = done.json
    assert found["student"]["accuracy"] < found["made"]["accuracy"]
    assert found["original"]["size_bytes"] == Artifact.from_file("linear.onnx").size_bytes
    # The same architecture is no smaller, which is said.
    assert "size" in found["short_of"]
    assert "accuracy" not in found["short_of"]
    again = penstock(*COMMON, *options, "--resume", "kept", "-o", "again.onnx")
    assert again.code == 0, again.err
    assert (student / "again.onnx").read_bytes() == (student / "out.onnx").read_bytes()


def test_a_student_that_learns_nothing_more(penstock, student: Path) -> None:
    options = ("--evaluate", "data.npz", "--budget", "50ms", "--epochs", "1", "--json", "-o", "out.onnx")
    done = penstock(*COMMON, "--student", "linear.onnx", *options)
    assert done.code == 0, done.err
    assert "accuracy" in done.json["short_of"]
    assert done.json["pays"] is False


def test_an_error_is_better_the_smaller_it_is(penstock, student: Path) -> None:
    with np.load(student / "data.npz") as data:
        np.savez(student / "rows.npz", x=data["x"])
        np.savez(student / "numbers.npz", x=data["x"], labels=data["x"] @ models.linear_weight(3, 2))
    options = (
        "--train",
        "rows.npz",
        "--evaluate",
        "numbers.npz",
        "--metric",
        "mae",
        "--budget",
        "50ms",
        "--epochs",
        "100",
        "-o",
        "out.onnx",
    )
    done = penstock(*COMMON, "--student", "student.onnx", *options)
    assert done.code == 0, done.err
    assert "mae of the student" in done.out
    assert "did not improve" not in done.out
    assert "mae, 20 samples" in done.out


@pytest.mark.parametrize(
    ("options", "code", "cause"),
    [
        (("--student", "none.onnx"), 3, "no model file 'none.onnx'"),
        (("--student", "other.onnx"), 2, "student and teacher differ: 'y' is FP32 [-1, 5] in the student"),
        (("--student", "renamed.onnx"), 2, "student and teacher differ: inputs ['a'] in the student, ['x'] in the"),
        (("--student", "text.onnx"), 2, "student 'text.onnx': the file is not an ONNX model"),
        (
            ("--teacher", "text.onnx", "--student", "student.onnx"),
            2,
            "teacher 'text.onnx': the file is not an ONNX model",
        ),
        (("--student", "student.onnx", "--temperature", "0"), 2, "--temperature must be greater than 0, got 0"),
        (("--student", "student.onnx", "--teacher-share", "2"), 2, "must be below 1"),
        (("--student", "out.onnx"), 2, "would overwrite"),
        ((), 2, "Missing option '--student'"),
    ],
)
def test_students_that_do_not_fit(penstock, student: Path, options: tuple[str, ...], code: int, cause: str) -> None:
    (student / "other.onnx").write_bytes(models.linear(3, 5).data)
    (student / "text.onnx").write_text("no model")
    renamed = onnx.load(student / "linear.onnx")
    renamed.graph.input[0].name = renamed.graph.node[0].input[0] = "a"
    onnx.save(renamed, student / "renamed.onnx")
    done = penstock(*COMMON, *options, "-o", "out.onnx")
    assert done.code == code
    assert cause in " ".join(done.err.replace("│", " ").split())
    assert not (student / "out.onnx").exists()
