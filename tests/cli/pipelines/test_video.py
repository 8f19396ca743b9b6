"""``penstock video``: the outputs of a pipeline for each frame."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import models
from clips import write_clip
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.pipeline.video import Sampling, read_frames
from penstock.runtime import Pipeline

PIPELINE = """
name: brightness
inputs:
  image: {media: image}
models: {mean: mean.onnx}
labels: {light: [dark, bright]}
steps:
  - {step: decode_image, in: image, out: pixels}
  - {step: resize, in: pixels, out: small, size: [24, 40]}
  - {step: normalise, in: small, out: normal}
  - {step: layout, in: normal, out: planes}
  - {model: mean, in: planes, out: {score: score, classes: classes}}
  - {step: top_k, in: classes, out: {labels: light}, labels: light, k: 1}
outputs: [score, light]
"""


@pytest.fixture
def bundle(folder: Path) -> Path:
    """A pipeline that returns the mean of a picture, and whether it exceeds one quarter."""
    model = models.artifact(
        [
            ("Flatten", ["image"], ["flat"]),
            ("MatMul", ["flat", "share"], ["score"]),
            ("Sub", ["score", "quarter"], ["excess"]),
            ("Mul", ["excess", "signs"], ["classes"]),
        ],
        [("image", TensorProto.FLOAT, ["N", 3, 24, 40])],
        [("score", TensorProto.FLOAT, ["N", 1]), ("classes", TensorProto.FLOAT, ["N", 2])],
        {
            "share": np.full((2880, 1), 1 / 2880, np.float32),
            "quarter": np.array(0.25, np.float32),
            "signs": np.array([-1, 1], np.float32),
        },
    )
    (folder / "mean.onnx").write_bytes(model.data)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    pack_pipeline(folder / "pipeline.yaml", folder / "brightness.bundle")
    return folder / "brightness.bundle"


def test_each_frame_gets_the_outputs_of_a_call(penstock, bundle: Path, folder: Path) -> None:
    clip = write_clip(folder / "clip.mp4", fade=True)
    done = penstock("video", "brightness.bundle", "clip.mp4", "--every", "2", "-o", "scores.csv", "--json")
    assert done.code == 0
    with open(folder / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    with Pipeline.open(bundle) as pipeline:
        expected = [(frame, pipeline(frame.pixels)) for frame in read_frames(clip, Sampling(every=2))]
    assert len(rows) == len(expected) == 30
    for row, (frame, outputs) in zip(rows, expected, strict=True):
        assert (int(row["frame"]), row["light"]) == (frame.index, outputs["light"][0])
        assert float(row["seconds"]) == pytest.approx(frame.seconds, abs=1e-6)
        assert np.float32(row["score"]) == outputs["score"], "to the bit"
    scores = np.array([outputs["score"] for _, outputs in expected], np.float64).ravel()
    found = done.json
    assert (found["frames"], found["written"], found["damage"]) == (30, "scores.csv", None)
    statistics = found["outputs"]["score"]
    assert statistics["count"] == 30
    assert statistics["mean"] == pytest.approx(scores.mean())
    assert (statistics["min"], statistics["max"]) == (scores.min(), scores.max())
    assert statistics["p95"] == pytest.approx(np.percentile(scores, 95))
    assert found["outputs"]["light"] == {
        name: sum(outputs["light"] == [name] for _, outputs in expected) for name in found["outputs"]["light"]
    }


def test_lists_are_summarised_whatever_a_frame_holds(penstock, bundle: Path, folder: Path) -> None:
    text = PIPELINE.replace(
        "{labels: light}, labels: light, k: 1", "{labels: light, scores: scores}, labels: light, at: 0"
    )
    text = text.replace("step: top_k", "step: threshold").replace("[score, light]", "[light, scores]")
    (folder / "pipeline.yaml").write_text(text.replace("k: 1", ""))
    pack_pipeline(folder / "pipeline.yaml", folder / "lists.bundle")
    write_clip(folder / "clip.mp4", fade=True)
    done = penstock("video", "lists.bundle", "clip.mp4", "-o", "lists.csv", "--json")
    with open(folder / "lists.csv", newline="") as file:
        rows = [(json.loads(row["light"]), json.loads(row["scores"])) for row in csv.DictReader(file)]
    assert all(len(labels) == len(scores) >= 1 for labels, scores in rows), "also lists of one element"
    found = done.json["outputs"]
    assert found["light"] == {
        name: count for name in ("dark", "bright") if (count := sum(name in labels for labels, _ in rows))
    }
    assert sum(found["light.first"].values()) == found["scores.length"]["count"] == len(rows)
    assert found["scores[0]"]["max"] == pytest.approx(max(scores[0] for _, scores in rows))
    shown = penstock("video", "lists.bundle", "clip.mp4")
    assert "scores.length" in shown.out
    assert "first" in shown.out


def test_json_lines_hold_the_same_rows(penstock, bundle: Path, folder: Path) -> None:
    write_clip(folder / "clip.webm", 20)
    assert penstock("video", "brightness.bundle", "clip.webm", "-o", "a.csv").code == 0
    done = penstock("video", "brightness.bundle", "clip.webm", "-o", "a.jsonl")
    assert done.code == 0
    assert "20 frames in" in done.out
    lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    with open(folder / "a.csv", newline="") as file:
        for row, line in zip(csv.DictReader(file), lines, strict=True):
            assert (int(row["frame"]), float(row["seconds"])) == (line["frame"], line["seconds"])
            assert [float(row["score"])] == line["score"]
            assert [row["light"]] == line["light"]


def test_a_truncated_clip_is_an_error_or_a_partial_result(penstock, bundle: Path, folder: Path) -> None:
    content = write_clip(folder / "clip.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(content[: len(content) * 2 // 3])
    done = penstock("video", "brightness.bundle", "cut.mp4", "-o", "a.csv")
    assert done.code == 2
    assert "'cut.mp4' is" in done.err
    assert not (folder / "a.csv").exists()
    done = penstock("video", "brightness.bundle", "cut.mp4", "-o", "a.csv", "--partial", "--json")
    assert done.code == 0
    assert "truncated" in done.json["damage"]
    assert len((folder / "a.csv").read_text().splitlines()) == done.json["frames"] + 1 > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clip.mp4", "-o", "a.txt"), "neither CSV nor JSON lines"),
        (("clip.mp4", "--start", "2", "--end", "1"), "--end must be greater than --start 2, got 1"),
        (("mean.onnx",), "cannot be read as video"),
        (("none.mp4",), "there is no file 'none.mp4'"),
        (("clip.mp4", "-o", "none/a.csv"), "the folder 'none' for 'a.csv' does not exist"),
    ],
)
def test_mistakes_are_explained(penstock, bundle: Path, folder: Path, arguments, message: str) -> None:
    write_clip(folder / "clip.mp4", 3)
    done = penstock("video", bundle.name, *arguments)
    assert done.code in (2, 3)
    assert message in done.err


def test_progress_is_shown_without_a_terminal(bundle: Path, folder: Path, monkeypatch, capsys) -> None:
    from penstock.cli.pipelines import video  # noqa: PLC0415 - the module and the command have one name

    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(video.StageProgress, "__call__", lambda _self, *stage: told.append(stage))
    video.video(bundle, write_clip(folder / "clip.mp4", 10))
    assert told == [("frames", number, 10) for number in range(1, 11)]
    assert "output  count" in capsys.readouterr().out


def test_a_range_without_frames_is_an_error(penstock, bundle: Path, folder: Path) -> None:
    clip = write_clip(folder / "clip.mp4", 10)
    found = penstock("video", bundle, clip, "--start", "5", "-o", folder / "scores.csv")
    assert (found.code, "no frames in this range" in found.err) == (2, True)
    assert not (folder / "scores.csv").exists()
    assert penstock("video", bundle, clip, "--fps", "inf").code == 2
