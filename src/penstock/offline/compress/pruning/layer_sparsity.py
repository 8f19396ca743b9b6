"""The sparsity that each layer tolerates, measured, and the sparsities that reach a total at the least predicted loss.

One layer at a time is pruned to some sparsities, the rest left alone, and the model judged: a curve per layer (Han et al.,
2015, §3.2, "sensitivity"). What is lost can only grow with sparsity, so the curves are made monotone by least squares (pool
adjacent violators), which takes the noise of few samples away. Losses of layers are taken to add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidConfig
from penstock.offline.compress.pruning.magnitude import LayerRule, PruneOptions, Share, prunable_weights, prune
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import load_model
from penstock.perf.chart import Scale, line_chart
from penstock.tensor import Array

Measure = Literal["divergence", "loss"]

_GRID = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)


class LayerCurve(msgspec.Struct, frozen=True):
    """One layer pruned by magnitude, alone; the points are in order of sparsity and begin with none."""

    weight: str
    size: int
    """Weights of the layer."""
    sparsities: tuple[float, ...]
    accuracies: tuple[float, ...]
    losses: tuple[float, ...]
    """Accuracy lost against the original; may be negative."""
    divergences: tuple[float, ...]
    """Mean divergence from the original's answers: KL of the class shares, or relative error where fidelity is judged."""

    def fitted(self, measure: Measure = "divergence") -> Array:
        """The non-decreasing values next to those measured, in least squares; 0 without pruning."""
        values = self.divergences if measure == "divergence" else self.losses
        return np.maximum(isotonic(np.asarray(values)), 0.0) * (np.arange(len(values)) > 0)


class LayerSensitivity(msgspec.Struct, frozen=True):
    """The curves of all layers, in order of the file."""

    metric: str
    accuracy: float
    """Of the original."""
    samples: int
    curves: tuple[LayerCurve, ...]

    def chart(self) -> str:
        """Accuracy by sparsity as SVG, one line per layer."""
        lines = {curve.weight: list(zip(curve.sparsities, curve.accuracies, strict=True)) for curve in self.curves}
        scales = Scale("sparsity of the layer", "{:.0%}"), Scale(self.metric, "{:.1%}")
        return line_chart(lines, "Accuracy by sparsity of each layer alone", *scales, [("original", self.accuracy)])


class Allocation(msgspec.Struct, frozen=True):
    """Sparsities that reach a total, and their predicted cost."""

    sparsities: dict[str, Share]
    predicted: float
    """The sum of the layers' fitted values there, on the convex hull of each curve."""
    sparsity: float
    """Of all weights of the layers together."""

    @property
    def rule(self) -> LayerRule:
        """The rule that prunes so."""
        return LayerRule(self.sparsities)


def measure_layers(
    artifact: Artifact,
    data: Dataset,
    options: PruneOptions | None = None,
    grid: Sequence[float] = _GRID,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> LayerSensitivity:
    """The curve of every prunable weight of ``artifact`` on ``data``, held out; ``options`` says which weights, not how much.

    Takes as many runs over the data as there are layers times points. Raises InvalidConfig for a grid that is not between 0
    and 1, and as ``magnitude.prune`` and ``Judge``.
    """
    options = options or PruneOptions()
    points = sorted({float(point) for point in grid} - {0.0})
    if not points or not 0 < points[0] <= points[-1] <= 1:
        raise InvalidConfig(f"sparsities to measure must be between 0 and 1, not {list(grid)}", "leave the grid out")
    weights = prunable_weights(load_model(artifact), options)
    judge = Judge(artifact, data)
    curves = []
    for number, (name, array) in enumerate(weights.items()):
        judged = [judge.baseline]
        for place, point in enumerate(points):
            on_progress(number * len(points) + place, len(weights) * len(points))
            rule = LayerRule({name: point})
            judged.append(judge.assess(prune(artifact, msgspec.structs.replace(options, rule=rule))))
        curves.append(
            LayerCurve(
                weight=name,
                size=array.size,
                sparsities=(0.0, *points),
                accuracies=tuple(one.accuracy.value for one in judged),
                losses=tuple(one.accuracy.loss.value for one in judged),
                divergences=tuple(float(one.divergence.mean()) for one in judged),
            )
        )
    on_progress(len(weights) * len(points), len(weights) * len(points))
    return LayerSensitivity(judge.metric, judge.baseline.accuracy.value, data.count, tuple(curves))


def allocate(curves: Sequence[LayerCurve], sparsity: float, measure: Measure = "divergence") -> Allocation:
    """The sparsities of layers whose weights together reach ``sparsity`` at the least predicted sum of ``measure``.

    On the lower convex hulls of the fitted curves the cheapest next step is known: the least loss per weight of all layers.
    Taken in that order, the last in part, steps give the optimum of the hulls (Shoham and Gersho, "Efficient bit allocation
    for an arbitrary set of quantizers", 1988). Raises InvalidConfig if the curves do not reach so far.
    """
    goal = sparsity * sum(curve.size for curve in curves)
    chosen: dict[str, float] = {curve.weight: 0.0 for curve in curves}
    removed = predicted = 0.0
    for _, name, size, step, cost in sorted(_steps(curves, measure)):
        share = min(1.0, max(0.0, goal - removed) / (size * step))
        chosen[name] += share * step
        removed += share * step * size
        predicted += share * cost
    if removed < goal * (1 - 1e-9):
        reach = sum(curve.size * curve.sparsities[-1] for curve in curves) / max(1, sum(c.size for c in curves))
        raise InvalidConfig(
            f"a sparsity of {sparsity:g} is beyond the measured {reach:.4g}", "measure the layers at higher sparsities"
        )
    total = max(1, sum(curve.size for curve in curves))
    return Allocation({name: min(1.0, value) for name, value in chosen.items()}, predicted, removed / total)


def isotonic(values: Array) -> Array:
    """The non-decreasing sequence of least squared distance to ``values``: pool adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    return np.concatenate([np.full(count, mean) for mean, count in blocks])


def hull(x: Array, y: Array) -> list[int]:
    """Positions of the points on the lower convex hull, by rising ``x``, from the first point to the last."""
    kept: list[int] = []
    for index in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[index] - x[b]) < (y[index] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(index)
    return kept


def _steps(curves: Sequence[LayerCurve], measure: Measure) -> list[tuple[float, str, int, float, float]]:
    """Steps along the hulls: (loss per weight, layer, its weights, sparsity gained, loss)."""
    steps = []
    for curve in curves:
        x, y = np.asarray(curve.sparsities), curve.fitted(measure)
        corners = hull(x, y)
        for a, b in itertools.pairwise(corners):
            step, cost = float(x[b] - x[a]), float(y[b] - y[a])
            steps.append((cost / (step * curve.size), curve.weight, curve.size, step, cost))
    return steps
