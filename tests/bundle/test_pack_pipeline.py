from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.bundle.open import open_bundle
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.bundle.pipeline import open_pipeline
from penstock.errors import (
    AlreadyExists,
    InvalidConfig,
    InvalidInput,
    InvalidModel,
    NotFound,
    PermissionDenied,
)
from pipelines import FEATURES, SCORES, WEIGHT, scores_bundle, scores_folder

PYTHON = SCORES.replace("  - step: top_k", "  - {python: my.py:grade, in: p, out: grade}\n  - step: top_k").replace(
    "outputs: [", "outputs: [grade, "
)


def test_a_pipeline_is_packed_with_all_it_needs(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    for name in ("linear.onnx", "pipeline.yaml"):
        (tmp_path / name).unlink()
    with penstock.open(path) as scores:
        found = scores(FEATURES)
    logits = FEATURES @ WEIGHT
    np.testing.assert_allclose(found["p"], np.exp(logits) / np.exp(logits).sum(), rtol=1e-5)
    assert found["label"] == [["no", "yes"][int(logits.argmax())]]


def test_the_same_pipeline_gives_the_same_bytes(tmp_path: Path) -> None:
    one = scores_bundle(tmp_path).read_bytes()
    pack_pipeline(tmp_path / "pipeline.yaml", tmp_path / "scores.bundle", overwrite=True)
    assert (tmp_path / "scores.bundle").read_bytes() == one
    with pytest.raises(AlreadyExists, match="exists"):
        pack_pipeline(tmp_path / "pipeline.yaml", tmp_path / "scores.bundle")


def test_labels_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("nein\nja\n")
    opened = open_pipeline(scores_bundle(tmp_path, SCORES.replace("[no, yes]", "labels.txt")))
    assert opened.resources.labels == {"pair": ("nein", "ja")}


def test_no_link_leads_out_of_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "labels.txt"
    inside.mkdir()
    outside.write_text("nein\nja\n")
    (inside / "labels.txt").symlink_to(outside)
    with pytest.raises(InvalidConfig, match=r"the file 'labels\.txt' is not below the folder"):
        scores_bundle(inside, SCORES.replace("[no, yes]", "labels.txt"))
    (inside / "labels.txt").unlink()
    scores_folder(inside)
    (inside / "linear.onnx").replace(tmp_path / "linear.onnx")
    (inside / "linear.onnx").symlink_to(tmp_path / "linear.onnx")
    with pytest.raises(InvalidConfig, match=r"the model 'linear\.onnx' is not below the folder"):
        pack_pipeline(inside / "pipeline.yaml", inside / "a.bundle")


def test_a_model_may_be_a_bundle(tmp_path: Path) -> None:
    scores_folder(tmp_path)
    pack_model(tmp_path / "linear.onnx", tmp_path / "linear.bundle")
    opened = open_pipeline(scores_bundle(tmp_path, SCORES.replace("linear.onnx", "linear.bundle")))
    assert opened.models["linear"].digest == open_bundle(tmp_path / "linear.bundle").digest


def test_python_is_packed_only_with_permission(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text('def grade(p: Tensor["FP32", 2]) -> str:\n    return "good"\n')
    with pytest.raises(PermissionDenied, match="runs Python code: my.py"):
        scores_bundle(tmp_path, PYTHON)
    (tmp_path / "my.py").write_text(
        'import penstock\nfrom penstock import Tensor\ndef grade(p: Tensor["FP32", 2]) -> str:\n    return "good"\n'
    )
    path = scores_bundle(tmp_path, PYTHON, allow_python=True)
    assert open_pipeline(path).manifest.python == ("files/my.py",)
    with pytest.raises(PermissionDenied, match="allow_python=True"):
        penstock.open(path)
    with penstock.open(path, allow_python=True) as scores:
        assert scores(FEATURES)["grade"] == "good"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("linear: linear.onnx", "linear: none.onnx", InvalidConfig, "line 5: there is no model 'none.onnx'"),
        (
            "linear: linear.onnx",
            "linear: ../linear.onnx",
            InvalidConfig,
            "line 5: the model '../linear.onnx' is not below the folder",
        ),
        ("linear: linear.onnx", "linear: pipeline.yaml", penstock.PenstockError, "model 'linear': "),
        ("[no, yes]", "none.txt", InvalidConfig, "line 6: there is no file 'none.txt'"),
        ("[no, yes]", "/etc/hostname", InvalidConfig, "file '/etc/hostname' is not below the folder"),
        (
            "{features: [1, 2, 3]}",
            "{features: [1, 2]}",
            InvalidConfig,
            r"line 17: the value has the shape \[2\], not \[3\]",
        ),
        ("{features: [1, 2, 3]}", "{features: [a, 2, 3]}", InvalidConfig, "line 17: the value is not an array of FP32"),
        ("{features: [1, 2, 3]}", "{}", InvalidConfig, "line 17: the example lacks the input 'features'"),
        ("{features: [1, 2, 3]}", "{features: [1, 2, 3], x: 1}", InvalidConfig, "line 17: there is no input 'x'"),
        ("{features: [1, 2, 3]}", "{features: [.nan, 2, 3]}", InvalidConfig, "not an array of FP32"),
        ("{features: [1, 2, 3]}", "{features: [1e39, 2, 3]}", InvalidConfig, "not an array of FP32: overflow"),
    ],
)
def test_mistakes_leave_no_bundle(old: str, new: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    assert old in SCORES
    with pytest.raises(error, match=message):
        scores_bundle(tmp_path, SCORES.replace(old, new, 1))
    assert not (tmp_path / "scores.bundle").exists()


def test_an_example_that_fails(tmp_path: Path) -> None:
    code = 'from penstock import Tensor\ndef grade(p: Tensor["FP32", 2]) -> str:\n    raise ValueError("no")\n'
    (tmp_path / "my.py").write_text(code)
    with pytest.raises(InvalidInput, match="example 1: step 'grade': 'grade' of my.py failed: ValueError: no"):
        scores_bundle(tmp_path, PYTHON, allow_python=True)


def test_an_output_that_a_condition_makes_absent(tmp_path: Path) -> None:
    text = SCORES.replace("k: 1", "k: 1\n    when: limit > 0").replace("outputs:", "constants: {limit: 0}\noutputs:")
    with pytest.raises(InvalidConfig, match="line 17: the output 'label' is absent if limit = 0: step 'top_k' needs"):
        scores_bundle(tmp_path, text)


def test_a_broken_model_and_a_missing_declaration(tmp_path: Path) -> None:
    scores_folder(tmp_path)
    (tmp_path / "linear.onnx").write_bytes(b"broken")
    with pytest.raises(InvalidModel, match="model 'linear': "):
        pack_pipeline(tmp_path / "pipeline.yaml", tmp_path / "a.bundle")
    with pytest.raises(NotFound, match=r"no file '.*none.yaml'"):
        pack_pipeline(tmp_path / "none.yaml", tmp_path / "a.bundle")


def test_a_declaration_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path):
        with pytest.raises(InvalidConfig, match=f"cannot read '{path}': it is not a file"):
            pack_pipeline(path, tmp_path / "a.bundle")


def test_huge_files_and_thousands_of_examples_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)
    path = scores_folder(tmp_path, SCORES.replace("[no, yes]", "huge.txt"))
    with pytest.raises(InvalidConfig, match=rf"'huge.txt' has {1 << 40} bytes, but a file of a pipeline has at most"):
        pack_pipeline(path, tmp_path / "b.bundle")
    path.write_text(SCORES + "  - {features: [1, 2, 3]}\n" * 1_000)
    with pytest.raises(InvalidConfig, match="'examples' is wrong: Expected 'list' of length <= 1000"):
        pack_pipeline(path, tmp_path / "b.bundle")
