"""Pack the digits model with its preprocessing and labels, and write test images as PNG files to try it on.

pip install 'penstock[image]'
python examples/digits_pipeline/digits.py --output digits
penstock infer digits/digits.bundle digits/*.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.runtime import Pipeline

EXAMPLE = Path(__file__).parent
DIGITS = EXAMPLE.parent / "digits"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCALE = 16
"""A pixel of the data becomes a square of this many pixels in the picture."""


def picture(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The picture of an image [1, 8, 8] in 0..1: [128, 128, 1] in 0..255."""
    large: NDArray[np.uint8] = np.round(image[0] * 255).astype(np.uint8).repeat(SCALE, 0).repeat(SCALE, 1)
    return large[..., None]


def test_set() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The test images of the digits example, and their labels."""
    with np.load(DIGITS / "evaluate.npz") as data:
        return data["image"], data["labels"]


def write(folder: Path) -> Path:
    """Write one PNG file for each digit, the pipeline and its bundle to ``folder``. Returns the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = test_set()
    for digit in range(10):
        first = np.flatnonzero(labels == digit)[0]
        Image.fromarray(picture(images[first])[..., 0]).save(folder / f"{digit}.png")
    for source in (DIGITS / "model.onnx", EXAMPLE / "pipeline.yaml"):
        shutil.copyfile(source, folder / source.name)
    pack_pipeline(folder / "pipeline.yaml", folder / "digits.bundle", overwrite=True)
    return folder / "digits.bundle"


def accuracy(bundle: Path) -> float:
    """Share of the test images, as pictures, whose best label is right."""
    images, labels = test_set()
    with Pipeline.open(bundle) as digits:
        answers = digits.batch(picture(image) for image in images)
    return float(np.mean([answer["labels"][0] == NAMES[label] for answer, label in zip(answers, labels, strict=True)]))


def main() -> None:
    """Write everything, and print the accuracy."""
    parser = argparse.ArgumentParser(description="Pack a pipeline that reads digits.")
    parser.add_argument("--output", type=Path, default=Path("digits"), help="folder to write to")
    bundle = write(parser.parse_args().output)
    print(f"{accuracy(bundle):.2%} of the test images are read correctly\nwrote {bundle}")


if __name__ == "__main__":
    main()
