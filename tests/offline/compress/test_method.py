from __future__ import annotations

from pathlib import Path

import pytest

import models
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.methods.qat import QatMethod

MODEL = models.linear(3, 2)


def test_progress_is_reported_by_stage() -> None:
    told: list[tuple[str, int, int]] = []
    context = StepContext(MODEL, MODEL, None, on_progress=lambda *step: told.append(step))
    context.stage("train")(1, 2)
    assert told == [("train", 0, 1), ("train", 1, 2)]


def test_what_was_made_before_an_interruption_is_taken_from_the_folder(tmp_path: Path) -> None:
    def never() -> Artifact:
        raise AssertionError("it was made before")

    context = StepContext(MODEL, MODEL, None, folder=tmp_path)
    made = context.once("thin", lambda: MODEL.derive(MODEL.data, "thin", {}, {}), "options", 1)
    assert context.once("thin", never, "options", 1) == made
    other = context.once("thin", lambda: MODEL, "options", 2)
    assert other == Artifact.from_bytes(MODEL.data)
    assert StepContext(MODEL, MODEL, None).once("thin", lambda: MODEL) is MODEL


def test_each_start_of_training_has_its_own_checkpoint(tmp_path: Path) -> None:
    method, context = QatMethod(), StepContext(MODEL, MODEL, None, folder=tmp_path)
    other = models.linear(3, 2, seed=1)
    assert method.hooks(context, MODEL, "train")["checkpoint"] != method.hooks(context, other, "train")["checkpoint"]
    assert "checkpoint" not in method.hooks(StepContext(MODEL, MODEL, None), MODEL, "train")


def test_the_folder_for_checkpoints_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is not a folder"):
        QatMethod.make({"resume": str(tmp_path / "file")})
