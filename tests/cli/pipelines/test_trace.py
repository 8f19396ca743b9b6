"""``penstock trace``: timelines of a pipeline."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from commands import Command
from pipelines import FEATURES, scores_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    text = """
name: shade
inputs:
  image: {media: image}
steps:
  - {step: decode_image, in: image, out: pixels}
  - {step: resize, in: pixels, out: small, size: [4, 4]}
outputs: [small]
"""
    (tmp_path / "pipeline.yaml").write_text(text)
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "black.png")
    return tmp_path


def _packed(penstock: Command, folder: Path) -> Path:
    done = penstock("pack", folder / "pipeline.yaml", "-o", folder / "shade.bundle")
    assert done.code == 0, done.err
    return folder / "shade.bundle"


def test_both_timelines_are_shown_and_written(penstock: Command, bundle: Path) -> None:
    packed = _packed(penstock, bundle)
    done = penstock("trace", packed, bundle / "black.png", "--items", "5", "-o", bundle / "t.svg")
    assert done.code == 0, done.err
    assert "one item at a time: 5 items" in done.out
    assert "decode_image" in done.out
    ET.fromstring((bundle / "t.svg").read_text())
    done = penstock("trace", packed, bundle / "black.png", "--items", "5", "-o", bundle / "t.json", "--json")
    assert set(done.json) == {"items", "one_item_at_a_time", "in_a_stream", "written"}
    events = [one for one in json.loads((bundle / "t.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert sorted(item for one in events if one["name"] == "decode_image" for item in one["args"]["items"]) == [
        *range(5)
    ]


def test_wrong_files_are_errors(penstock: Command, bundle: Path) -> None:
    packed = _packed(penstock, bundle)
    assert penstock("trace", packed, bundle / "none.png").code == 3
    assert penstock("trace", packed, bundle / "black.png", "-o", bundle / "t.txt").code == 2
    assert penstock("trace", packed, bundle / "pipeline.yaml").code == 2


def test_a_pipeline_of_tensors_needs_files_it_can_read(penstock: Command, tmp_path: Path) -> None:
    packed = scores_bundle(tmp_path)
    np.save(tmp_path / "x.npy", FEATURES)
    assert penstock("trace", packed, tmp_path / "x.npy").code == 2
