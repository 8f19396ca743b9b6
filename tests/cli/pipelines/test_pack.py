from __future__ import annotations

from pathlib import Path

from commands import Command
from pipelines import SCORES, scores_folder


def test_a_pipeline_is_packed(penstock: Command, folder: Path) -> None:
    scores_folder(folder)
    done = penstock("pack", "pipeline.yaml", "-o", "scores.bundle")
    assert done.code == 0
    assert "scores: 3 steps → label: list of text, p: tensor FP32 [2]" in done.out
    assert "recorded 2 examples with the results of all steps" in done.out
    facts = penstock("pack", "pipeline.yaml", "-o", "scores.bundle", "--json").json
    assert (facts["name"], facts["steps"], facts["models"], facts["examples"]) == (
        "scores",
        ["linear", "softmax", "top_k"],
        ["linear"],
        2,
    )
    assert facts["notes"] == []


def test_a_pipeline_without_examples_is_noted(penstock: Command, folder: Path) -> None:
    scores_folder(folder, SCORES.partition("examples:")[0])
    assert "note: the pipeline has no examples" in " ".join(
        penstock("pack", "pipeline.yaml", "-o", "a.bundle").out.split()
    )


def test_mistakes_name_line_step_and_fix(penstock: Command, folder: Path) -> None:
    scores_folder(folder, SCORES.replace("in: logits", "in: logit"))
    done = penstock("pack", "pipeline.yaml", "-o", "a.bundle")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: pipeline.yaml, line 9: step 'softmax' reads value 'logit', which no step produces",
        "  fix: did you mean 'logits'?",
    ]
    assert not (folder / "a.bundle").exists()


def test_other_files_are_not_overwritten(penstock: Command, folder: Path) -> None:
    scores_folder(folder)
    (folder / "notes.txt").write_text("keep")
    assert penstock("pack", "pipeline.yaml", "-o", "notes.txt").code == 8
    assert (folder / "notes.txt").read_text() == "keep"
    assert penstock("pack", "none.yaml", "-o", "a.bundle").code == 3
    assert penstock("pack", "pipeline.yaml", "-o", "a.bundle", "--version", "x").code == 2
