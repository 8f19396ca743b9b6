"""Search a student's width and depth within a latency limit, by successive halving [Jamieson and Talwalkar, 2016].

    python examples/students/search.py examples/digits/model.onnx examples/digits/calibrate.npz --limit-ms 0.05

Latency is measured first: every point is timed in ONNX Runtime with random weights, which take the same time as trained weights.
Points that are too slow are not trained. All other points are distilled in rungs: each rung continues from the weights of the previous
rung, and keeps the better half.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
from students import STUDENTS

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import ContractUnmet
from penstock.offline.compress.training.distill import DistillOptions, distill
from penstock.offline.compress.training.fit import FitOptions
from penstock.offline.judge.judge import Judge
from penstock.offline.judge.race import race
from penstock.offline.sessions import signature_of
from penstock.samples.open import load_dataset


class Point(msgspec.Struct):
    """One architecture and its results so far."""

    width: int
    depth: int
    ms: float
    artifact: Artifact
    accuracy: float = 0.0
    epochs: float = 0.0


def latency_table(
    students: dict[tuple[int, int], Artifact], data: Dataset, budget_s: float
) -> dict[tuple[int, int], float]:
    """Median milliseconds for one row on one thread, from interleaved calls."""
    timings = race(students, data.mix(), budget_s)
    return {size: timing.p50_ms for size, timing in timings.items()}


def search(teacher: Artifact, data: Dataset, points: Sequence[Point], rungs: Sequence[float]) -> list[Point]:
    """All ``points``, the best first. Points with more trained epochs come first, then points with higher accuracy on a held-out third
    of ``data``."""
    train, held_out = data.split(1 / 3)
    judge = Judge(teacher, held_out)
    alive = list(points)
    for number, epochs in enumerate(rungs):
        options = DistillOptions(fit=FitOptions(epochs=epochs, learning_rate=5e-3, seed=number))
        for point in alive:
            point.artifact = distill(point.artifact, teacher, train, options)
            point.accuracy = judge.assess(point.artifact).accuracy.value
            point.epochs += epochs
        alive = sorted(alive, key=lambda point: (-point.accuracy, point.ms))[: max(1, len(alive) // 2)]
    return sorted(points, key=lambda point: (-point.epochs, -point.accuracy, point.ms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--student", choices=STUDENTS, default="depthwise")
    parser.add_argument("--limit-ms", type=float, required=True)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--rungs", type=float, nargs="+", default=[20, 40, 80])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    teacher = Artifact.from_file(given.teacher)
    signature = signature_of(teacher)
    data = load_dataset(given.data, signature)
    sizes = itertools.product(given.widths, given.depths)
    students = {size: STUDENTS[given.student](signature, *size) for size in sizes}
    table = latency_table(students, data, budget_s=5.0)
    points = [Point(*size, table[size], students[size]) for size in students if table[size] <= given.limit_ms]
    if not points:
        raise ContractUnmet(
            f"no student takes {given.limit_ms} ms or less; the fastest takes {min(table.values()):.3f} ms"
        )
    print("width depth      ms  epochs  held out")
    for point in search(teacher, data, points, given.rungs):
        print(f"{point.width:5} {point.depth:5} {point.ms:7.4f} {point.epochs:7g} {point.accuracy:9.2%}")
    best = max(points, key=lambda point: (point.epochs, point.accuracy, -point.ms))
    if given.output:
        given.output.write_bytes(best.artifact.data)


if __name__ == "__main__":
    main()
