"""Iterative pruning: alternate pruning and retraining while a contract is met.

The method is that of Han, Pool, Tran, Dally, "Learning both Weights and Connections for Efficient Neural Networks", 2015, with the
cubic schedule of Zhu and Gupta, "To prune, or not to prune", 2017, §3. Level t of T reaches the fraction ``1 - (1 - t/T)³`` of the
goal, so the first steps are large and the last steps small. The model is already trained, so the first phase of Han et al. is skipped.
Retraining starts from the values of the remaining weights; pruned weights stay zero.

Each level starts from the stored file of an earlier level, so an interrupted run continues to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.options import NotNegative, Options
from penstock.offline.compress.pruning.magnitude import Masks, PruneOptions, prunable_weights, prune, sparsity
from penstock.offline.compress.pruning.rounds import RoundEntry, Rounds
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions, learning_rate
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, hold_out
from penstock.offline.optimize.model import load_model


class IterativeOptions(Options, frozen=True):
    """The goal, the schedule, and the allowed loss."""

    goal: PruneOptions = PruneOptions()
    """The sparsity to reach, and the weights to exclude from pruning."""
    levels: Annotated[int, msgspec.Meta(ge=1, le=100)] = 8
    """Number of rounds of pruning and retraining up to the goal."""
    contract: Contract = Contract(max_accuracy_loss=0.005)
    """The contract that every level must meet on the held-out data. The contract's latency limit is ignored."""
    retrain: FitOptions = FitOptions(epochs=10, learning_rate=3e-3)
    """The training of each level. Its ``weight_decay`` is the L2 penalty. Han et al. retrain by SGD on labels, at a tenth of the
    original learning rate or less. Distillation with AdamW works better at a higher rate."""
    second_chance: NotNegative = 3.0
    """If a level fails the contract, retrain it for this multiple of ``retrain.epochs``. 0: never."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 2
    """Number of intermediate levels to try after a failure. Each is halfway between the failed level and the last good level."""
    l1: NotNegative = 0.0
    """L1 penalty of prunable weights: each step moves these weights towards zero by this value times the learning rate. Han et al.
    find an L2 penalty better if the remaining weights are retrained.
    """


class PruningLevel(RoundEntry, frozen=True, kw_only=True):
    """One level, with its accuracy on held-out data."""

    factor: float
    """Fraction of the goal, from 0 to 1."""
    epochs: float
    sparsity: float = 0.0


def prune_iteratively(
    artifact: Artifact,
    data: Dataset,
    options: IterativeOptions | None = None,
    *,
    held_out: Dataset | None = None,
    folder: Path | None = None,
    on_progress: Progress = no_progress,
    is_over: Callable[[], bool] = lambda: False,
) -> Artifact:
    """Return the sparsest model of the run that meets the contract on ``held_out``, which defaults to the last fifth of ``data``.

    Retraining distils from ``artifact`` and uses labels if ``data`` has them. ``folder`` stores every level. A later call with the
    same arguments continues from this folder. When ``is_over()`` returns True, no further level starts. The provenance step records
    the sparsity by layer, every level in order, and the accuracy of the original when it is pruned to the same sparsities without
    retraining.

    Raises ContractUnmet, whose ``candidates`` are the levels, if no level meets the contract; InvalidArgument if ``folder`` holds
    another run; Unsupported for weights that cannot be trained; and the errors of ``magnitude.prune``, ``Judge`` and ``fit``.
    """
    options = options or IterativeOptions()
    options.check()
    # Fail before the first level if the rule cannot reach the goal.
    options.goal.rule.masks(prunable_weights(load_model(artifact), options.goal))
    if held_out is None:
        data, held_out = hold_out(artifact, data)
    judge = Judge(artifact, held_out, options.retrain.threads, contract=options.contract)
    decides = data.digest, msgspec.to_builtins(options)
    levels = Rounds(PruningLevel, "level", judge, options.contract, lambda level: level.sparsity, folder, *decides)
    teacher = Teacher(artifact, data)

    def retrain(step: PruningLevel, checkpoint: Path | None) -> tuple[Artifact, PruningLevel]:
        goal, seed = _towards(options.goal, step.factor), options.retrain.seed + len(levels.entries)
        fit = msgspec.structs.replace(options.retrain, epochs=step.epochs, seed=seed)
        start = levels.models[step.start]
        model = retrain_pruned(start, data, teacher, goal, fit, l1=options.l1, checkpoint=checkpoint)
        return model, msgspec.structs.replace(step, sparsity=sparsity(model, options.goal)["sparsity"])

    on_progress(0, options.levels)
    while not is_over() and (step := next_step(levels.entries, options)) is not None:
        levels.take(lambda checkpoint, step=step: retrain(step, checkpoint))  # type: ignore[misc]
        on_progress(min(len(levels.entries), options.levels - 1), options.levels)
    on_progress(options.levels, options.levels)
    why = levels.entries[-1].objection if levels.entries else "there was no time for a level"
    model, facts = levels.result(
        f"no level of pruning meets the contract: {why}",
        "allow a larger loss, more epochs, more levels, or more data",
    )
    facts |= {**sparsity(model, options.goal), "one_shot": _one_shot(artifact, levels, options.goal)}
    return artifact.derive(model, "prune_iteratively", msgspec.to_builtins(options), facts)


def next_step(levels: Sequence[PruningLevel], options: IterativeOptions) -> PruningLevel | None:
    """The next level to train, with its start, factor and epochs. None if there is no next level."""
    good = max((n for n, level in enumerate(levels) if not level.objection), key=lambda n: levels[n].factor, default=-1)
    reached = levels[good].factor if good >= 0 else 0.0
    epochs = options.retrain.epochs
    if levels and levels[-1].objection and options.second_chance:
        last = levels[-1]
        if last.start < 0 or levels[last.start].factor != last.factor:
            return PruningLevel(start=len(levels) - 1, factor=last.factor, epochs=epochs * options.second_chance)
    schedule = [1 - (1 - t / options.levels) ** 3 for t in range(1, options.levels + 1)]
    failed = [level.factor for level in levels if level.objection and level.factor > reached]
    if failed:
        halves = {level.factor for level in levels} - set(schedule)
        following = (reached + min(failed)) / 2 if len(halves) < options.retries else None
    else:
        following = next((factor for factor in schedule if factor > reached), None)
    return None if following is None else PruningLevel(start=good, factor=following, epochs=epochs)


def _one_shot(original: Artifact, levels: Rounds[PruningLevel], goal: PruneOptions) -> list[tuple[float, float]]:
    """Sparsity and accuracy of the original model, pruned to each level's sparsity in one step without retraining."""
    points = {}
    for factor in sorted({level.factor for level in levels.entries}):
        pruned = prune(original, _towards(goal, factor))
        points[pruned.provenance[-1].facts["sparsity"]] = levels.judge.assess(pruned).accuracy.value
    return sorted(points.items())


def _towards(goal: PruneOptions, factor: float) -> PruneOptions:
    return msgspec.structs.replace(goal, rule=goal.rule.scaled(factor))


def retrain_pruned(
    artifact: Artifact,
    data: Dataset,
    teacher: Artifact | Teacher,
    options: PruneOptions,
    fit: FitOptions,
    *,
    l1: float = 0.0,
    **hooks: Any,
) -> Artifact:
    """Make one level: prune ``artifact`` by ``options``, and train the pruned model to reproduce the outputs of ``teacher``.

    ``hooks`` are the hooks of ``recover`` except ``before_step`` and ``after_step``. Raises Unsupported if a prunable weight cannot
    be trained, and the errors of ``prune`` and ``recover``.
    """
    weights = prunable_weights(load_model(artifact), options)
    model = TrainableModel(artifact)
    if missing := sorted(weights.keys() - model.weights.keys()):
        raise Unsupported(f"weight(s) {missing[:8]} cannot be trained", "train in FP32, or name them in skip")
    masking = _Masking(model, options.rule.masks(weights), fit, l1)
    report = recover(model, data, teacher, fit, before_step=masking.before, after_step=masking.after, **hooks)
    return model.to_artifact("retrain", msgspec.to_builtins(fit), report.facts())


class _Masking:
    """Keeps pruned weights at zero.

    A weight hook masks pruned weights in the graph, so they receive no gradient. The parameters are masked again after every step,
    since the optimiser's moments and weight decay would move them.
    """

    def __init__(self, model: TrainableModel, masks: Masks, fit: FitOptions, l1: float) -> None:
        self._parameters = {name: model.weights[name] for name in masks}
        self._masks = {name: torch.from_numpy(mask.astype(np.float32)) for name, mask in masks.items()}
        self._fit, self._l1, self._rate = fit, l1, 0.0
        for name, mask in self._masks.items():
            model.weight_hooks[name] = mask.mul
        self.after()

    def before(self, step: int, steps: int) -> None:
        self._rate = learning_rate(step, steps, self._fit)

    def after(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.mul_(self._masks[name])
                if self._l1:  # the proximal step of the L1 penalty does not move a weight across zero
                    shrunk = (parameter.abs() - self._rate * self._l1).clamp_min(0)
                    parameter.copy_(parameter.sign() * shrunk)
