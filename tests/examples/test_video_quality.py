"""The estimator of quality follows the damage of a clip, with the same answers for frames, files and servers."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipelines.scripts import script
from commands import Command
from example_pipelines import same_answers
from penstock.pipeline.video import read_frames
from penstock.runtime import Pipeline

pytest.importorskip("torch", reason="the estimator is trained with torch")


def test_similarity_is_that_of_the_definition() -> None:
    with script("video_quality/frames.py") as example:
        frame = example["scene"](3)
        assert example["similarity"](frame, frame) == 1
        flat = np.full_like(frame, 100)
        darker = np.full_like(frame, 80)  # without texture, only the means count
        c1 = (0.01 * 255) ** 2
        assert example["similarity"](flat, darker) == pytest.approx((16_000 + c1) / (16_400 + c1))
        damaged = [example["similarity"](frame, example["damaged"](frame, 0, quality)) for quality in (95, 20, 3)]
        assert damaged == sorted(damaged, reverse=True)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_clip_in_scores_out(penstock: Command, tmp_path: Path) -> None:
    with script("video_quality/quality.py") as example:
        bundle = example["write"](tmp_path, count=200, epochs=6)
        _, error = example["measure"](bundle, 60)
    assert error < 0.15  # only the level is learned so fast; the slow test judges the order
    done = penstock("video", bundle, tmp_path / "clip.mp4", "-o", tmp_path / "scores.csv")
    assert done.code == 0, done.err
    with open(tmp_path / "scores.csv", newline="") as file:
        scores = [np.float32(row["quality"]) for row in csv.DictReader(file)]
    with Pipeline.open(bundle) as pipeline:
        expected = [pipeline(frame.pixels)["quality"].item() for frame in read_frames(tmp_path / "clip.mp4")]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)  # the engine may round in batches otherwise
    same_answers(penstock, bundle, [tmp_path / "sharp.png", tmp_path / "damaged.png"], "image/png")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_full_training_ranks_new_scenes(tmp_path: Path) -> None:
    with script("video_quality/quality.py") as example:
        ranks, error = example["measure"](example["write"](tmp_path))
    assert ranks > 0.6
    assert error < 0.08
