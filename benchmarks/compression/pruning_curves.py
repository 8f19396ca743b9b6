"""Accuracy by sparsity for three methods: pruning at once, pruning at once and retraining, and pruning and retraining in turn."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.pruning.iterative import IterativeOptions, prune_iteratively, retrain_pruned
from penstock.offline.compress.pruning.magnitude import sparsity
from penstock.offline.compress.taps import Progress
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, hold_out
from penstock.perf.chart import Scale, line_chart


class PruningCurves(msgspec.Struct, frozen=True):
    """For each method, the points (sparsity, accuracy on held-out data), in order of sparsity."""

    metric: str
    original: float
    """The accuracy without pruning."""
    lines: dict[str, list[tuple[float, float]]]

    def chart(self) -> str:
        """The curves as an SVG chart."""
        scales = Scale("sparsity", "{:.0%}"), Scale(self.metric, "{:.0%}")
        return line_chart(self.lines, "Accuracy by sparsity", *scales, [("original", self.original)])


def pruning_curves(
    artifact: Artifact,
    data: Dataset,
    options: IterativeOptions | None = None,
    *,
    held_out: Dataset | None = None,
    on_progress: Progress = lambda *_: None,
) -> PruningCurves:
    """Run all three methods to the target of ``options``. Its contract is ignored, so any accuracy may be lost.

    At each point, the model that was pruned at once is retrained for as many epochs as the iteratively pruned model up to this
    point. This function therefore takes about ``levels / 2`` times as long as ``prune_iteratively``. Raises the same errors as
    ``prune_iteratively``.
    """
    options = msgspec.structs.replace(
        options or IterativeOptions(), contract=Contract(1.0, max_output_error=float("inf"))
    )
    if held_out is None:
        data, held_out = hold_out(artifact, data)
    facts = prune_iteratively(artifact, data, options, held_out=held_out).provenance[-1].facts
    judge, teacher = Judge(artifact, held_out, options.retrain.threads), Teacher(artifact, data)
    retrained = []
    for number, level in enumerate(facts["levels"], 1):
        on_progress(number, len(facts["levels"]) + 1)
        goal = msgspec.structs.replace(options.goal, rule=options.goal.rule.scaled(level["factor"]))
        fit = msgspec.structs.replace(options.retrain, epochs=options.retrain.epochs * number)
        model = retrain_pruned(artifact, data, teacher, goal, fit, l1=options.l1)
        retrained.append((sparsity(model, goal)["sparsity"], judge.assess(model).accuracy.value))
    on_progress(len(facts["levels"]) + 1, len(facts["levels"]) + 1)
    lines = {
        "at once": facts["one_shot"],
        "at once, retrained": retrained,
        "iterative": [(level["sparsity"], level["accuracy"]) for level in facts["levels"]],
    }
    return PruningCurves(facts["metric"], facts["original_accuracy"], lines)
