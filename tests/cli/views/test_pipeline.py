from __future__ import annotations

from pathlib import Path

from commands import Command
from pipelines import SCORES, scores_bundle

PYTHON = SCORES.replace("  - step: top_k", "  - {python: my.py:grade, in: p, out: grade}\n  - step: top_k").replace(
    "outputs: [", "outputs: [grade, "
)


def test_inspect_shows_steps_models_labels_and_code(penstock: Command, folder: Path) -> None:
    (folder / "my.py").write_text(
        'from penstock import Tensor\nprint("has run")\ndef grade(p: Tensor["FP32", 2]) -> str:\n    return "good"\n'
    )
    scores_bundle(folder, PYTHON, allow_python=True)
    done = penstock("inspect", "scores.bundle")
    assert done.code == 0
    for line in (
        "step    linear: model linear; features → logits",
        "labels  pair: 2",
        "files/my.py: code",
        'return "good"',
    ):
        assert line in done.out
    assert "has run" not in done.out.splitlines()
    facts = penstock("inspect", "scores.bundle", "--json").json
    assert [step["name"] for step in facts["steps"]] == ["linear", "softmax", "grade", "top_k"]
    assert facts["labels"] == {"pair": 2}
    assert list(facts["python"]) == ["files/my.py"]
    assert facts["models"]["linear"]["inputs"][0]["name"] == "x"


def test_code_needs_permission(penstock: Command, folder: Path) -> None:
    (folder / "my.py").write_text(
        'from penstock import Tensor\ndef grade(p: Tensor["FP32", 2]) -> str:\n    return "good"\n'
    )
    scores_bundle(folder, PYTHON, allow_python=True)
    done = penstock("infer", "scores.bundle", "[1, 2, 3]")
    assert (done.code, "--allow-python" in done.err) == (2, True)
    assert '"grade": "good"' in penstock("infer", "scores.bundle", "[1, 2, 3]", "--allow-python").out
    assert penstock("inspect", "scores.bundle", "--report", "a.html").code == 2
