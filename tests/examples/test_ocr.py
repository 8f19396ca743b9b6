"""The two-stage reader of text: its pages are what they claim, and all ways of asking give the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.pipelines.scripts import script
from commands import Command
from example_pipelines import same_answers
from penstock.pipeline.steps.boxes.draw import Draw
from penstock.runtime import Pipeline

pytest.importorskip("torch", reason="the networks are trained with torch")


def test_pages_are_repeatable_and_their_boxes_hold_the_ink() -> None:
    with script("ocr/text.py") as example:
        pages = [example["page"](seed) for seed in range(30)]
        again = example["page"](7)
        assert np.array_equal(again.pixels, pages[7].pixels)
        assert again.texts == pages[7].texts
        for one in pages:
            assert len(one.texts) == len(one.boxes) >= 1
            assert set("".join(one.texts)) <= set(example["CHARACTERS"])
            assert one.boxes.min() > -8
            assert (one.boxes < (example["WIDTH"] + 8, example["HEIGHT"] + 8)).all()
            left, right = one.boxes[:, 0], one.boxes[:, 1]
            assert (right[:, 0] > left[:, 0]).all(), "the first corner is the left one"
            small = example["shrunk"](one.boxes)
            heights, before = (np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1) for boxes in (small, one.boxes))
            np.testing.assert_allclose(heights, 0.4 * before, rtol=1e-4)


def test_the_distance_of_texts() -> None:
    with script("ocr/ocr.py") as example:
        distance = example["distance"]
        assert [distance(*each) for each in (("", ""), ("", "abc"), ("abc", "abc"), ("kitten", "sitting"))] == [
            0,
            3,
            0,
            3,
        ]
        square = np.array([[0, 0], [10, 0], [10, 10], [0, 10]], np.float32)
        assert example["overlap"](square, square + np.float32([5, 0])) == pytest.approx(50 / 150)


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_picture_in_lines_out(penstock: Command, tmp_path: Path) -> None:
    with script("ocr/ocr.py") as example:
        bundle = example["write"](
            tmp_path, 40, 40, 120
        )  # the detector learns fast; the recogniser only some characters
        found = example["measure"](bundle, [example["page"](10**6 + seed) for seed in range(8)])
    assert found.recall > 0.5
    Image.new("RGB", (300, 200), "white").save(tmp_path / "empty.png")
    answers = same_answers(penstock, bundle, [tmp_path / "example.png", tmp_path / "empty.png"], "image/png")
    for answer in answers:
        assert len(answer["texts"]) == len(answer["scores"]) == len(answer["boxes"])
    assert answers[0]["boxes"]
    assert any(answers[0]["texts"])
    drawn = penstock("infer", bundle, tmp_path / "example.png", "--draw", tmp_path / "drawn.png")
    assert drawn.code == 0, drawn.err
    with Image.open(tmp_path / "example.png") as picture, Pipeline.open(bundle) as ocr:
        pixels = np.asarray(picture)
        answer = ocr(pixels)
    shown = {"boxes": answer["boxes"], "labels": answer["texts"], "scores": answer["scores"]}
    assert (tmp_path / "drawn.png").read_bytes() == Draw().run({"image": pixels, **shown})["picture"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_full_training_reads(tmp_path: Path) -> None:
    with script("ocr/ocr.py") as example:
        found = example["measure"](
            example["write"](tmp_path, *example["FULL"]), [example["page"](10**6 + seed) for seed in range(100)]
        )
    assert found.recall > 0.9
    assert found.character_errors < 0.25
