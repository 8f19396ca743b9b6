"""The pipeline of digits reads pictures, with the same answers in Python, on the command line and over HTTP and gRPC."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pipelines.scripts import script
from commands import Command
from example_pipelines import same_answers


def test_pictures_in_labels_out(penstock: Command, tmp_path: Path) -> None:
    with script("digits_pipeline/digits.py") as example:
        bundle = example["write"](tmp_path)
        assert example["accuracy"](bundle) == 794 / 797  # that of the model on its tensors
        names = example["NAMES"]
    answers = same_answers(penstock, bundle, [tmp_path / f"{digit}.png" for digit in range(10)], "image/png")
    assert [answer["labels"][0] for answer in answers] == list(names)
    assert all(answer["scores"] == sorted(answer["scores"], reverse=True) for answer in answers)
