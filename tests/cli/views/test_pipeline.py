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
        "input   features  tensor FP32 [3]",
        "step    linear: model linear; features → logits",
        "step    grade: Python function grade of my.py; p → grade",
        "step    top_k: step top_k (labels pair, k 1); p → label, score",
        "output  label  list of text",
        "model   linear: x FP32[N, 3] → y FP32[N, 2]; ",
        "labels  pair: 2, no, yes",
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


BRANCHES = """\
name: branches
inputs: {image: {media: image}, boxes: {shape: [-1, 4]}, score: {shape: []}}
constants: {flag: 1}
steps:
  - {step: decode_image, in: image, out: pixels}
  - {step: crop_boxes, in: {image: pixels, boxes: boxes}, out: crops, when: score >= 0.5}
  - {map: crops, as: crop, steps: [{step: resize, in: crop, out: small, size: [4, 4]}], out: {small: pictures}}
  - {step: draw, in: {image: pixels, boxes: boxes}, out: drawn, when: flag}
outputs: [pictures, drawn]
optional: [pictures]
"""


def test_inspect_shows_conditions_and_the_steps_for_each_element(penstock: Command, folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(BRANCHES)
    assert penstock("pack", "pipeline.yaml", "-o", "branches.bundle").code == 0
    done = penstock("inspect", "branches.bundle")
    for line in (
        "step    constant flag: constant; - → flag",
        "step    crop_boxes: step crop_boxes; pixels, boxes → crops  when score >= 0.5",
        "step    crops: steps for each of crops, as crop; crops → pictures",
        "step      resize: step resize (size [4, 4]); crop → small",
        "output  pictures  list of image UINT8 [4, 4, 3]  optional",
    ):
        assert line in done.out
    steps = {one["name"]: one for one in penstock("inspect", "branches.bundle", "--json").json["steps"]}
    assert steps["crop_boxes"]["when"] == "score >= 0.5"
    assert steps["crops/resize"]["inputs"] == {"value": "crop"}
