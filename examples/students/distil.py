"""Distil a small student from a teacher and compare the two.

    pip install -e '.[torch]'
    python examples/students/distil.py examples/digits/model.onnx examples/digits/calibrate.npz examples/digits/evaluate.npz \
        --student depthwise --width 16 --depth 3 --output student.onnx
"""

import argparse
from pathlib import Path

import numpy as np
from students import STUDENTS

from penstock.artifact import Artifact
from penstock.offline.compress.training.distill import DistillOptions, distill
from penstock.offline.compress.training.fit import FitOptions
from penstock.offline.judge.judge import Comparison, Judge
from penstock.offline.sessions import signature_of
from penstock.samples.open import load_dataset
from penstock.tensor import Array


def shifted(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Shift images by up to one pixel. Student and teacher get the same shifted images. Other inputs are returned unchanged."""

    def moved(array: Array) -> Array:
        if array.ndim != 4:
            return array
        down, right = (int(step) for step in rng.integers(-1, 2, 2))
        padded = np.pad(array, ((0, 0), (0, 0), (1, 1), (1, 1)))
        return padded[:, :, 1 + down :, 1 + right :][:, :, : array.shape[2], : array.shape[3]].copy()

    return {name: moved(array) for name, array in arrays.items()}


def run(
    teacher_file: Path, train: Path, test: Path, student: str, options: DistillOptions, size: tuple[int, int]
) -> tuple[Artifact, Comparison]:
    """The distilled student of ``size`` (width, depth), and its comparison with the teacher on ``test``."""
    teacher = Artifact.from_file(teacher_file)
    signature = signature_of(teacher)
    learned = distill(
        STUDENTS[student](signature, *size), teacher, load_dataset(train, signature), options, augment=shifted
    )
    return learned, Judge(teacher, load_dataset(test, signature)).compare(learned)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--student", choices=STUDENTS, default="depthwise")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=200)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    options = DistillOptions(fit=FitOptions(epochs=given.epochs, learning_rate=5e-3))
    learned, found = run(given.teacher, given.train, given.test, given.student, options, (given.width, given.depth))
    if given.output:
        given.output.write_bytes(learned.data)
    print(f"teacher  {found.original_bytes:>9} bytes  {found.original_accuracy:.2%}  {found.original_ms:.3f} ms")
    print(f"student  {found.compressed_bytes:>9} bytes  {found.accuracy.value:.2%}  {found.compressed_ms:.3f} ms")
    print(
        f"{found.size_ratio:.1f} times smaller, {found.speedup.value:.2f} times faster, one thread, {found.rows} row(s)"
    )


if __name__ == "__main__":
    main()
