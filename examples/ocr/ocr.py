"""Train a detector and a recogniser of text on rendered pages, pack them into a pipeline, and measure it on other pages.

pip install 'penstock[image,torch]'
python examples/ocr/ocr.py --output ocr
penstock infer ocr/ocr.bundle ocr/example.png --draw lines.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from text import CHARACTERS, HEIGHT, WIDTH, Page, page
from torch import nn
from train import Detector, Recogniser, ctc_loss, detector_batches, detector_loss, line_batches, train

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.runtime import Pipeline

EXAMPLE = Path(__file__).parent
HELD_OUT = 1_000_000
"""The first page that is not used for training."""
FULL, QUICK = (1500, 200, 1200), (60, 40, 40)
"""Number of pages, and of steps of both trainings."""


class Quality(NamedTuple):
    """Results on held-out pages."""

    precision: float
    """Share of the found boxes that cover a line: their intersection is more than half of their union."""
    recall: float
    """Share of the lines that are found."""
    lines: float
    """Share of the lines whose text is read without an error."""
    character_errors: float
    """Wrong, missing and added characters, as a share of all characters. A line that is not found counts as missing."""


def overlap(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Intersection over union of two quadrilaterals."""
    shared = cv2.intersectConvexConvex(one, other)[0]
    return shared / (cv2.contourArea(one) + cv2.contourArea(other) - shared)


def distance(one: str, other: str) -> int:
    """Levenshtein distance."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def measure(bundle: Path, pages: list[Page]) -> Quality:
    """The quality of the whole pipeline on ``pages``."""
    boxes = found = exact = errors = lines = characters = 0
    with Pipeline.open(bundle) as ocr:
        for one, answer in zip(pages, ocr.stream(each.pixels for each in pages), strict=True):
            boxes += len(answer["boxes"])
            lines += len(one.texts)
            characters += sum(map(len, one.texts))
            for text, box in zip(one.texts, one.boxes, strict=True):
                overlaps = [overlap(box, other) for other in answer["boxes"]]
                hit = bool(overlaps) and max(overlaps) > 0.5
                read = answer["texts"][int(np.argmax(overlaps))] if hit else ""
                found += hit
                exact += read == text
                errors += distance(read, text)
    return Quality(found / max(1, boxes), found / lines, exact / lines, errors / characters)


def export(model: nn.Module, shape: tuple[int, ...], input: str, output: str, path: Path) -> None:
    """Write ``model`` as ONNX with a free batch axis."""
    axes = {input: {0: "batch"}, output: {0: "batch"}}
    names = {"input_names": [input], "output_names": [output], "dynamic_axes": axes}
    torch.onnx.export(model, (torch.zeros(1, *shape),), path, opset_version=18, dynamo=False, **names)


def write(folder: Path, pages: int, detector_steps: int, recogniser_steps: int) -> Path:
    """Train on ``pages`` pages, and write models, pipeline and bundle to ``folder``. Returns the bundle."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums have a fixed order, and small layers gain nothing from more threads
    folder.mkdir(parents=True, exist_ok=True)
    known, chance = [page(seed) for seed in range(pages)], np.random.default_rng(0)
    detector, recogniser = Detector(), Recogniser()
    train(detector, detector_batches(known, chance), detector_loss, detector_steps)
    train(recogniser, line_batches(known, chance), ctc_loss, recogniser_steps)
    export(detector, (3, HEIGHT, WIDTH), "image", "map", folder / "detector.onnx")
    export(recogniser, (3, 32, 256), "line", "logits", folder / "recogniser.onnx")
    (folder / "labels.txt").write_text("\n".join(CHARACTERS) + "\n")
    Image.fromarray(page(HELD_OUT - 1).pixels).save(folder / "example.png")
    shutil.copyfile(EXAMPLE / "pipeline.yaml", folder / "pipeline.yaml")
    pack_pipeline(folder / "pipeline.yaml", folder / "ocr.bundle", overwrite=True)
    return folder / "ocr.bundle"


def main() -> None:
    """Train, and print the quality."""
    parser = argparse.ArgumentParser(description="Train, pack and measure a reader of text.")
    parser.add_argument("--output", type=Path, default=Path("ocr"), help="folder to write to")
    parser.add_argument("--quick", action="store_true", help="train for seconds only; the reader stays poor")
    arguments = parser.parse_args()
    bundle = write(arguments.output, *(QUICK if arguments.quick else FULL))
    found = measure(bundle, [page(HELD_OUT + seed) for seed in range(20 if arguments.quick else 300)])
    print(
        f"on held-out pages: {found.precision:.1%} of the boxes are lines, {found.recall:.1%} of the lines are found,"
    )
    print(
        f"{found.lines:.1%} of the lines are read without an error, {found.character_errors:.2%} of the characters are wrong"
    )
    print(f"wrote {bundle}")


if __name__ == "__main__":
    main()
