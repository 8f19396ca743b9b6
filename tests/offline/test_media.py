"""Builds and single methods from folders of images and sounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import input_models
from brief_builds import build
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData
from penstock.offline.build import Recipe
from penstock.offline.compress.functions import compress
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod

RECIPE = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MIN_MAX,), careful=False, timing_s=0.3)


def pictures(folder: Path, count: int) -> list[np.ndarray]:
    """Images of two colours in folders that are named after the class that ``image_net`` gives them."""
    model = get_engine("onnxruntime").load(input_models.image_net(), {"threads": 1})
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        pixels = np.full((20, 24, 3), 200 * np.eye(3)[number % 3], np.uint8) + rng.integers(
            0, 50, (20, 24, 3), np.uint8
        )
        x = np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis], np.float32) / 255
        label = int(model.forward({"x": x})["y"].argmax())
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        found.append(x)
    model.unload()
    return found


def test_a_model_is_built_from_a_folder_of_images_by_class(tmp_path: Path) -> None:
    pictures(tmp_path / "images", 60)
    assert len([*(tmp_path / "images").iterdir()]) > 1
    result = build(input_models.image_net(), tmp_path / "m.bundle", tmp_path / "images", recipe=RECIPE)
    assert result.evidence.metric == "top-1"
    assert result.evidence.baseline.accuracy is not None
    assert result.evidence.baseline.accuracy.value == 1.0


def test_a_method_calibrates_on_images_as_on_their_arrays(tmp_path: Path) -> None:
    arrays = pictures(tmp_path / "images", 20)
    model = input_models.image_net()
    one = compress.quantize(model, tmp_path / "images").model
    ordered = sorted(range(20), key=lambda n: str(next((tmp_path / "images").glob(f"*/{n}.png"))))
    other = compress.quantize(model, {"x": np.concatenate([arrays[n] for n in ordered])}).model
    assert one.digest == other.digest


def test_images_for_a_model_of_text_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "images", 3)
    with pytest.raises(InvalidData, match="image files, but no input of the model is known to take them"):
        build(input_models.text_encoder(), tmp_path / "m.bundle", tmp_path / "images", recipe=RECIPE)
