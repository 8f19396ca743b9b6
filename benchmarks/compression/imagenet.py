"""Measures INT8 on a user's copy of ImageNet and models, and compares it with the figures of the talk that introduced KL
calibration.

``python -m benchmarks.compression.imagenet MODEL.onnx FOLDER [--count N]``: FOLDER contains one folder of pictures per class, as
in ImageNet's validation set. The alphabetical order of these folders numbers the classes. Pictures are resized to 256, cropped to
224, and normalised as torchvision's models expect. A tenth of the pictures, at most 500, is used for calibration, without labels.
The accuracy is measured on all other pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.optimize.optimizer import optimize
from penstock.resources import machine_facts
from penstock.tensor import Array

_TALK = {
    "ResNet-50": (73.23, 73.10),
    "ResNet-101": (74.39, 74.40),
    "ResNet-152": (74.78, 74.70),
    "VGG-19": (68.41, 68.38),
    "GoogLeNet": (68.57, 68.10),
    "AlexNet": (57.08, 57.00),
}
"""Top-1 accuracy in per cent of FP32 and INT8, as remembered from the slides of S. Migacz, "8-bit Inference with TensorRT", GTC
2017."""
_MEAN, _DEVIATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_BATCH = 50
_MOST_CALIBRATION = 500


def list_pictures(folder: Path) -> list[tuple[Path, int]]:
    """Every picture with its class number, in a fixed random order. Raises RuntimeError if there are no pictures."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [
        (file, number)
        for number, path in enumerate(classes)
        for file in sorted(path.iterdir())
        if file.suffix.lower() in (".jpeg", ".jpg", ".png")
    ]
    if not found:
        raise RuntimeError(f"'{folder}' has no folders with pictures")
    return [found[index] for index in np.random.default_rng(0).permutation(len(found))]


def read(files: Sequence[Path]) -> Array:
    """Pictures as float32 [N, 3, 224, 224]."""
    return np.stack([_read(file) for file in files])


def top1(model: Artifact, pictures: Sequence[tuple[Path, int]], threads: int) -> float:
    """The fraction of pictures that ``model`` classifies correctly. Reads the pictures batch by batch."""
    loaded = get_engine("onnxruntime").load(model, {"threads": threads})
    hits = 0
    for start in range(0, len(pictures), _BATCH):
        batch = pictures[start : start + _BATCH]
        answers = loaded.forward({loaded.signature.input_names[0]: read([file for file, _ in batch])})
        scores = next(iter(answers.values()))
        hits += int((scores.argmax(axis=1) == [number for _, number in batch]).sum())
    loaded.unload()
    return hits / len(pictures)


def main() -> None:
    """Measure the accuracies and print them."""
    parser = argparse.ArgumentParser(description="Compare INT8 on your copy of ImageNet with published figures.")
    parser.add_argument("model", type=Path, help="an ONNX model: input [N, 3, 224, 224], output class scores")
    parser.add_argument("folder", type=Path, help="a folder with one folder of pictures per class")
    parser.add_argument("--count", type=int, default=50_000, help="maximum number of pictures to use")
    arguments = parser.parse_args()
    pictures = list_pictures(arguments.folder)
    cut = min(_MOST_CALIBRATION, max(1, len(pictures) // 10))
    machine = machine_facts()
    original = Artifact.from_file(arguments.model)
    name = get_engine("onnxruntime").load(original, {"threads": 1}).signature.input_names[0]
    samples = make_dataset({name: read([file for file, _ in pictures[:cut]])}, None)
    fp32, _ = optimize(original, [samples.rows(0, 1)])
    test = pictures[cut : cut + arguments.count]
    table = Table("network", "FP32 top-1", "INT8 top-1")
    before = top1(fp32, test, machine.cores)
    for title, method in {"KL": RangeMethod.ENTROPY, "min-max": RangeMethod.MIN_MAX, "MSE": RangeMethod.MSE}.items():
        recipe = PtqRecipe(method=method, equalize=False, reconstruct=False, correct_biases=False)
        after = top1(quantize_with(recipe, fp32, samples, integer_scheme(machine)), test, machine.cores)
        table.add_row(f"{arguments.model.stem}, {title}, {len(test)} pictures", f"{before:.2%}", f"{after:.2%}")
    for network, (fp32_top1, int8_top1) in _TALK.items():
        table.add_row(f"[dim]{network}, KL, the talk[/dim]", f"{fp32_top1} %", f"{int8_top1} %")
    Console().print(table)


def _read(file: Path) -> Array:
    image = Image.open(file).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32) / 255
    normal = (pixels - np.array(_MEAN, np.float32)) / np.array(_DEVIATION, np.float32)
    return np.ascontiguousarray(normal.transpose(2, 0, 1))


if __name__ == "__main__":
    main()
