"""Draws the figures of `docs/compression`, which show the effect of methods on trained networks: ``python -m
benchmarks.compression.pictures``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.compression import data
from benchmarks.compression.losses import score
from benchmarks.compression.pruning_curves import pruning_curves
from benchmarks.compression.train import trained
from penstock.bundle.coded import encode
from penstock.offline.compress.pruning.iterative import IterativeOptions
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.ranges.chart import range_chart
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.compress.training.options import FitOptions
from penstock.perf.chart import Scale, line_chart
from penstock.resources import machine_facts

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def sparsity() -> str:
    """Accuracy by sparsity of LeNet-300-100: pruned at once, pruned at once and retrained, and pruned and retrained in turn."""
    split = data.digits28()
    options = IterativeOptions(
        PruneOptions(GlobalRule(0.97)), levels=8, retrain=FitOptions(epochs=8, learning_rate=3e-3)
    )
    return pruning_curves(trained("LeNet-300-100"), split.train, options, held_out=split.test).chart()


def divergence() -> str:
    """The KL search on a tensor of the residual network, calibrated on contaminated data."""
    statistics = collect(trained("residual"), data.contaminated(data.digits().calibrate).inputs)
    return range_chart(statistics, integer_scheme(machine_facts()))


def sharing() -> str:
    """Accuracy by size of LeNet-300-100 for codebooks of several sizes, with all weights and with pruned weights. No retraining."""
    model, test = trained("LeNet-300-100"), data.digits28().test
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, start in {
        "all weights": model,
        "half of the weights": prune(model, PruneOptions(GlobalRule(0.5))),
    }.items():
        points = []
        for bits in (2, 3, 4, 5, 6, 8):
            shared = share(start, ShareOptions(fc_bits=bits))
            points.append((len(encode(shared.data)) / 1024, score(shared, test)))
        lines[name] = points
    scales = Scale("KiB as coded, 2 to 8 bits a weight", "{:.0f}", True), Scale("top-1", "{:.1%}")
    return line_chart(lines, "Accuracy by size", *scales, [("original, 1,042 KiB", score(model, test))])


def main() -> None:
    """Write the figures."""
    for name, draw in {"sparsity": sparsity, "divergence": divergence, "sharing": sharing}.items():
        (IMAGES / f"{name}.svg").write_text(draw() + "\n")


if __name__ == "__main__":
    main()
