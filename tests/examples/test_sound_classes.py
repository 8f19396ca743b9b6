"""Sounds are classified on the spectrograms of the training, with the same answers by every way of asking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.pipelines.scripts import script
from commands import Command
from example_pipelines import same_answers
from penstock.runtime import Pipeline

pytest.importorskip("torch", reason="the classifier is trained with torch")
soundfile = pytest.importorskip("soundfile", reason="sounds are read with soundfile")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sounds_in_classes_out(penstock: Command, tmp_path: Path) -> None:
    with script("sound_classes/sounds.py") as example:
        bundle = example["write"](tmp_path, count=600, epochs=8)
        assert example["accuracy"](bundle, 120, -20) > 0.8  # of six classes
        classes = example["CLASSES"]
    files = [tmp_path / f"{name}.wav" for name in classes]
    answers = same_answers(penstock, bundle, files, "audio/wav")
    assert all(set(answer["labels"]) < set(classes) for answer in answers)
    samples, _ = soundfile.read(files[0], dtype="float32")
    with Pipeline.open(bundle) as pipeline:
        assert pipeline.to_json(pipeline(samples)) == answers[0], "samples are the same as their file"
        again = pipeline(np.concatenate([samples, samples]))
        assert pipeline.to_json(again) == answers[0], "only the first second counts"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_full_training_is_robust_to_noise(tmp_path: Path) -> None:
    with script("sound_classes/sounds.py") as example:
        bundle = example["write"](tmp_path)
        assert example["accuracy"](bundle, 300, -20) > 0.95
        assert example["accuracy"](bundle, 300, 0) > 0.9
