"""The steps that train, by distillation from the model that the plan starts from and, if the data has them, from labels.

They need the extra ``torch``. Each keeps its progress in the scratch folder, and goes on from it after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.planner.moves import State, Workshop, int8_scheme, placement
from penstock.offline.compress.planner.plan_store import read_model, write_model
from penstock.offline.compress.pruning.iterative import IterativeOptions, prune_iteratively
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions
from penstock.offline.compress.pruning.structured.recovery import ShrinkOptions, shrink
from penstock.offline.compress.ptq.recipe import PtqRecipe, equalized, quantize_with
from penstock.offline.compress.sharing.centroid_tuning import CentroidOptions, tune_centroids
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.memory import check_training
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.qat import QatOptions, train_quantized
from penstock.offline.compress.training.trainable import TrainableModel

_BATCH = 32
_SPARSITY = 0.98
_SECOND_CHANCE = 2.0
"""Times the epochs, where a round was too much: time that is spent here is missed by the steps that follow."""


def shrink_to(workshop: Workshop, state: State, speedup: float) -> Artifact:
    """Channels and heads cut until the model is ``speedup`` times as fast, trained after every cut. A larger ``speedup`` goes on
    from the rounds of a smaller one."""
    _check_memory(workshop, state.model)
    options = ShrinkOptions(
        speedup=speedup,
        contract=workshop.spending.allowance("structure"),
        fit=_fit(workshop),
        second_chance=_SECOND_CHANCE,
        threads=workshop.threads,
    )
    return shrink(
        state.model,
        workshop.fitted,
        options,
        held_out=workshop.judge.data,
        folder=workshop.scratch / "shrink",
        on_progress=workshop.on_progress,
        is_over=workshop.is_over,
    )


def split_layers(workshop: Workshop, state: State) -> Artifact:
    """Products split into thinner ones, then trained."""
    options = FactorizeOptions(max_error=0.1, threads=workshop.threads)
    thin = _once(
        workshop, "thin", lambda: factorize(state.model, workshop.fitted, options, progress=workshop.on_progress)
    )
    _check_memory(workshop, thin)
    model = TrainableModel(thin)
    report = recover(model, workshop.fitted, workshop.start, _fit(workshop), **_hooks(workshop, "thin"))
    return model.to_artifact("recover", {"teacher": workshop.start.digest}, report.facts())


def prune_weights(workshop: Workshop, state: State) -> Artifact:
    """As many weights zero as the contract bears, retrained after each level."""
    _check_memory(workshop, state.model)
    options = IterativeOptions(
        goal=PruneOptions(GlobalRule(_SPARSITY)),
        contract=workshop.spending.allowance("sparsity"),
        retrain=_fit(workshop, rate=3e-3),
        second_chance=_SECOND_CHANCE,
    )
    return prune_iteratively(
        state.model,
        workshop.fitted,
        options,
        held_out=workshop.judge.data,
        folder=workshop.scratch / "prune",
        on_progress=workshop.on_progress,
        is_over=workshop.is_over,
    )


def tune_shared(workshop: Workshop, state: State, shared: Artifact) -> Artifact:
    """The values that weights share, trained. It is short, and begins anew if it was interrupted."""
    _check_memory(workshop, shared)
    options = CentroidOptions(_fit(workshop, rate=1e-4))
    return tune_centroids(shared, workshop.start, workshop.fitted, options, workshop.on_progress)


def train_int8(workshop: Workshop, state: State) -> Artifact:
    """The INT8 model trained, from where quantisation left it."""
    _check_memory(workshop, state.model)
    prepared = equalized(state.model, workshop.fitted)
    recipe = PtqRecipe(equalize=False, correct_biases=False, placement=placement(workshop, state))
    start = _once(workshop, "int8", lambda: quantize_with(recipe, prepared, workshop.fitted, int8_scheme(workshop)))
    asked = {"epochs": workshop.epochs, "seed": workshop.seed, "threads": workshop.threads}
    options = QatOptions(msgspec.structs.replace(QatOptions().fit, **asked))
    hooks = _hooks(workshop, "int8")
    return train_quantized(start, prepared, workshop.fitted, options, teacher=workshop.start, **hooks)


def _fit(workshop: Workshop, rate: float = 1e-3) -> FitOptions:
    return FitOptions(
        epochs=workshop.epochs, learning_rate=rate, batch_size=_BATCH, seed=workshop.seed, threads=workshop.threads
    )


def _hooks(workshop: Workshop, name: str) -> dict[str, Any]:
    return {"checkpoint": workshop.scratch / f"{name}.training", "on_progress": workshop.on_progress}


def _once(workshop: Workshop, name: str, make: Callable[[], Artifact]) -> Artifact:
    """What ``make`` makes, or made before an interruption: measured times may have decided it, and training goes on from it."""
    path = workshop.scratch / f"{name}.model"
    found = read_model(path)
    if found is None:
        found = make()
        write_model(path, found)
    return found


def _check_memory(workshop: Workshop, model: Artifact) -> None:
    check_training(model, workshop.fitted, _BATCH, workshop.machine.memory_bytes)
