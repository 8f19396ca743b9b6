"""Measure how the loss depends on the sparsity of each layer, and choose each layer's sparsity for a total at the least loss.

Each layer is pruned alone to several sparsities, which gives a curve for the layer (Han et al., 2015, §3.2, "sensitivity"). The true
loss never falls as sparsity grows, so an isotonic fit reduces the noise of few samples. The losses of layers are assumed to add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidConfig
from penstock.offline.compress.options import Part
from penstock.offline.compress.pruning.magnitude import LayerRule, PruneOptions, prunable_weights, prune
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import load_model
from penstock.perf.chart import Scale, line_chart
from penstock.tensor import Array

_GRID = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)


class LayerCurve(msgspec.Struct, frozen=True):
    """The effect of pruning one layer alone, by magnitude. The points are in order of sparsity and start at 0."""

    weight: str
    size: int
    """Number of weights."""
    sparsities: tuple[float, ...]
    accuracies: tuple[float, ...]
    divergences: tuple[float, ...]
    """Mean divergence from the original's outputs: KL of the class probabilities, or relative error if the metric is fidelity."""

    def fitted(self) -> Array:
        """The isotonic least-squares fit of the divergences; 0 at sparsity 0."""
        return np.maximum(isotonic(np.asarray(self.divergences)), 0.0) * (np.arange(len(self.divergences)) > 0)


class LayerSensitivity(msgspec.Struct, frozen=True):
    """The curves of all layers, in file order."""

    metric: str
    accuracy: float
    """Accuracy of the original."""
    samples: int
    curves: tuple[LayerCurve, ...]

    def chart(self) -> str:
        """An SVG chart of accuracy against sparsity, with one line for each layer."""
        lines = {curve.weight: list(zip(curve.sparsities, curve.accuracies, strict=True)) for curve in self.curves}
        scales = Scale("sparsity of the layer", "{:.0%}"), Scale(self.metric, "{:.1%}")
        return line_chart(lines, "Accuracy by sparsity of each layer alone", *scales, [("original", self.accuracy)])


class Allocation(msgspec.Struct, frozen=True):
    """The sparsities, by weight name, that give a total sparsity, and their predicted divergence."""

    sparsities: dict[str, Part]
    predicted: float
    """The sum of the layers' divergences, according to the convex hulls of the fitted curves."""
    sparsity: float
    """Sparsity of all layers together."""

    @property
    def rule(self) -> LayerRule:
        """The pruning rule with these sparsities."""
        return LayerRule(self.sparsities)


def measure_layers(
    artifact: Artifact,
    data: Dataset,
    options: PruneOptions | None = None,
    grid: Sequence[float] = _GRID,
    on_progress: Progress = no_progress,
    contract: Contract = Contract(),  # noqa: B008 - immutable
) -> LayerSensitivity:
    """Measure the curve of every prunable weight of ``artifact`` on held-out ``data``. ``contract`` determines the metric.

    ``options.rule`` is ignored, since every layer is pruned at each point of ``grid``. This takes one run over the data per layer and
    point. Raises InvalidConfig if a point of the grid is not between 0 and 1, and the errors of ``magnitude.prune`` and ``Judge``.
    """
    options = options or PruneOptions()
    points = sorted({float(point) for point in grid} - {0.0})
    if not points or not 0 < points[0] <= points[-1] <= 1:
        raise InvalidConfig(
            f"sparsities to measure must be between 0 and 1, got {list(grid)}", "correct the grid, or omit it"
        )
    weights = prunable_weights(load_model(artifact), options)
    judge = Judge(artifact, data, contract=contract)
    curves: list[LayerCurve] = []
    total = len(weights) * len(points)
    for name, array in weights.items():
        judged = [judge.baseline]
        for place, point in enumerate(points):
            on_progress(len(curves) * len(points) + place, total)
            rule = LayerRule({name: point})
            judged.append(judge.assess(prune(artifact, msgspec.structs.replace(options, rule=rule))))
        curves.append(
            LayerCurve(
                weight=name,
                size=array.size,
                sparsities=(0.0, *points),
                accuracies=tuple(one.accuracy.value for one in judged),
                divergences=tuple(float(one.divergence.mean()) for one in judged),
            )
        )
    on_progress(total, total)
    return LayerSensitivity(judge.metric, judge.baseline.accuracy.value, data.count, tuple(curves))


def allocate(curves: Sequence[LayerCurve], sparsity: float) -> Allocation:
    """Choose the sparsity of each layer for a total of ``sparsity`` at the least predicted divergence.

    Steps along the lower convex hulls of the fitted curves are taken in order of divergence per weight; the last step may be
    partial. This is optimal for the hulls (Shoham and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988).
    Raises InvalidConfig if the curves end at a lower sparsity.
    """
    total = max(1, sum(curve.size for curve in curves))
    goal = sparsity * total
    chosen: dict[str, float] = {curve.weight: 0.0 for curve in curves}
    removed = predicted = 0.0
    for _, name, size, step, cost in sorted(_steps(curves)):
        share = min(1.0, max(0.0, goal - removed) / (size * step))
        chosen[name] += share * step
        removed += share * step * size
        predicted += share * cost
    if removed < goal * (1 - 1e-9):
        reach = sum(curve.size * curve.sparsities[-1] for curve in curves) / total
        raise InvalidConfig(
            f"a sparsity of {sparsity:g} is beyond the measured maximum, {reach:.4g}",
            "measure the layers at higher sparsities",
        )
    return Allocation({name: min(1.0, value) for name, value in chosen.items()}, predicted, removed / total)


def isotonic(values: Array) -> Array:
    """The non-decreasing sequence nearest to ``values`` in least squares, by the pool-adjacent-violators algorithm."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    return np.concatenate([np.full(count, mean) for mean, count in blocks])


def hull(x: Array, y: Array) -> list[int]:
    """Indices of the points on the lower convex hull, in order of ``x``."""
    kept: list[int] = []
    for index in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[index] - x[b]) < (y[index] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(index)
    return kept


def _steps(curves: Sequence[LayerCurve]) -> list[tuple[float, str, int, float, float]]:
    """The steps along the hulls, as tuples (divergence per weight, layer, size of the layer, sparsity gained, divergence added)."""
    steps = []
    for curve in curves:
        x, y = np.asarray(curve.sparsities), curve.fitted()
        for a, b in itertools.pairwise(hull(x, y)):
            step, cost = float(x[b] - x[a]), float(y[b] - y[a])
            steps.append((cost / (step * curve.size), curve.weight, curve.size, step, cost))
    return steps
