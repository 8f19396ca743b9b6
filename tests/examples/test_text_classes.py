"""A tokenizer and a classifier that are trained in place, with the same answers by every way of asking."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pipelines.scripts import script
from commands import Command
from example_pipelines import same_answers

pytest.importorskip("torch", reason="the classifier is trained with torch")
pytest.importorskip("tokenizers", reason="the tokenizer is trained with tokenizers")

TEXTS = [
    "Fit the estimator to the training samples.",
    "Returns a new tensor whose gradient is not tracked.",
    "Write the row to the file, and close the archive.",
    "  ÜBER\u00a0\t\n ﬁles … 漢字  ",
    "x",
]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentences_in_libraries_out(penstock: Command, tmp_path: Path) -> None:
    with script("text_classes/libraries.py") as example:
        known, held_out = example["sentences"]()
        texts = {one.text for one in known}
        assert not texts & {one.text for one in held_out}
        names = list(example["MODULES"])
        assert {one.label for one in held_out} == set(range(len(names)))
        bundle, accuracy = example["write"](tmp_path, epochs=2)
    assert accuracy > 0.5  # of four libraries
    answers = same_answers(penstock, bundle, TEXTS, "text/plain")
    assert [answer["labels"][0] for answer in answers[:2]] == ["scikit-learn", "torch"]
    assert all(set(answer["labels"]) < set(names) for answer in answers)
