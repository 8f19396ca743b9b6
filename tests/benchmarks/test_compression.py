"""What the compression scenario stands on: its data, its networks, and the harness for a user's own pictures."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.compression import data, imagenet, nets
from benchmarks.scenarios import SCENARIOS, compress
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine


def forward(model: Artifact, images: np.ndarray) -> np.ndarray:
    return get_engine("onnxruntime").load(model, {"threads": 1}).forward({"input": images})["output"]


@pytest.mark.parametrize("make", [data.digits, data.digits28, data.patterns, data.texts])
def test_splits_do_not_overlap_and_calibration_comes_from_training(make: object) -> None:
    split = make()  # type: ignore[operator]
    rows = [{row.tobytes() for row in part.inputs["input"]} for part in split]
    train, calibrate, validate, test = rows
    assert calibrate <= train
    assert len(calibrate) >= 0.9 * data.CALIBRATION
    # A few pictures and texts are there twice.
    assert len(train & test) <= 0.01 * len(test)
    assert len(validate & (train | test)) <= 0.01 * len(validate)


def test_contaminated_data_are_too_large_in_every_tenth_sample() -> None:
    clean = data.digits().calibrate
    ratio = data.contaminated(clean).inputs["input"].max(axis=(1, 2, 3)) / clean.inputs["input"].max(axis=(1, 2, 3))
    assert sorted(set(ratio.round(3))) == [1, 40]
    assert (ratio > 1).mean() == pytest.approx(0.1)


def test_characters_are_rendered_alike_every_time() -> None:
    try:
        split = data.glyphs(720)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert split.train.inputs["input"].shape == (480, 1, 28, 28)
    assert 0.02 < split.train.inputs["input"].mean() < 0.5
    data.glyphs.cache_clear()
    assert data.glyphs(720).train.digest == split.train.digest


def test_outlier_channels_do_not_change_the_function() -> None:
    images = data.digits().test.inputs["input"][:50]
    for model in (nets.depthwise(), nets.deep()):
        before, after = forward(model, images), forward(nets.with_outliers(model), images)
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5 * np.abs(before).max())
    assert nets.with_outliers(nets.deep(), only=3).digest != nets.with_outliers(nets.deep()).digest


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_from_its_files(tmp_path: Path, zipped: bool) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 30)):
        for kind, shape in (("images-idx3-ubyte", (count, 28, 28)), ("labels-idx1-ubyte", (count,))):
            array = rng.integers(0, 10, shape).astype(np.uint8)
            content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + array.tobytes()
            name = f"{part}-{kind}"
            (tmp_path / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    split = data.mnist(tmp_path)
    assert split.train.inputs["input"].shape == (160, 1, 28, 28)
    assert split.test.labels is not None
    assert split.test.labels.max() < 10


def test_a_folder_without_mnist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="train-images-idx3-ubyte' is no IDX file"):
        data.mnist(tmp_path)


def test_pictures_by_class_are_counted(tmp_path: Path) -> None:
    for number, colour in enumerate(((255, 0, 0), (0, 255, 0))):
        folder = tmp_path / f"class{number}"
        folder.mkdir()
        for index, size in enumerate(((300, 260), (256, 400), (640, 480))):
            Image.new("RGB", size, colour).save(folder / f"{index}.png")
    pictures = imagenet.list_pictures(tmp_path)
    assert sorted(number for _, number in pictures) == [0, 0, 0, 1, 1, 1]
    assert imagenet.read([file for file, _ in pictures]).shape == (6, 3, 224, 224)
    net = nets.Net()
    pooled = net.op("Flatten", net.op("GlobalAveragePool", "input"))
    model = net.artifact(net.op("MatMul", pooled, net.weight(np.eye(3)[:, :2])), [3, 224, 224], [2], 1)
    assert imagenet.top1(model, pictures, 1) == 1
    with pytest.raises(RuntimeError, match="no folders with pictures"):
        imagenet.list_pictures(tmp_path / "class0")


def test_the_scenario_is_listed_and_every_part_can_be_asked_for() -> None:
    assert "compress" in SCENARIOS
    assert set(compress.PARTS) >= {
        "int8",
        "accuracy",
        "pruning",
        "structured",
        "low_rank",
        "deep_compression",
    }
