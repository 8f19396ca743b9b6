"""The steps that a plan can take: each one call of a method, on the model of a state.

Steps that train are in ``trained_moves.py``, which needs torch and is imported when the first of them is taken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Attempt
from penstock.errors import Unsupported
from penstock.offline.compress.planner.budget import Kind, Spending
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.mixed import choose
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import FastestOptions, fastest_placement
from penstock.offline.compress.ptq.placement import Placement
from penstock.offline.compress.ptq.ranges import Method
from penstock.offline.compress.ptq.recipe import PtqRecipe, equalized, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme
from penstock.offline.dataset import Dataset
from penstock.resources import MachineFacts

Target = Literal["latency", "size"]

_TRAINED = "penstock.offline.compress.planner.trained_moves"
_RANKING_S = 5.0


class Workshop(msgspec.Struct, frozen=True):
    """What steps work with."""

    original: Artifact
    fitted: Dataset
    """Samples to calibrate and train on."""
    held: Dataset
    """Samples to judge on, which no step has trained on."""
    machine: MachineFacts
    threads: int
    epochs: float
    seed: int
    spending: Spending
    target: Target


class State(msgspec.Struct, frozen=True):
    """A model that was kept, and how it came to be."""

    name: str
    model: Artifact
    precision: str
    steps: tuple[str, ...]
    attempt: Attempt


class Move(msgspec.Struct, frozen=True):
    """One step."""

    name: str
    kind: Kind
    make: Callable[[Workshop, State], Artifact]
    precision: str = ""
    """Of the model that it makes; empty if it stays."""


class Stage(msgspec.Struct, frozen=True):
    """Steps of one kind, and how to go through them.

    ``climb``: each goes on from the one before, until one is not kept. ``descend``: all from the same model, until one is not
    kept. ``first``: all from the same model, until one is kept.
    """

    moves: tuple[Move, ...]
    order: Literal["climb", "descend", "first"]


def stages(target: Target) -> tuple[Stage, ...]:
    """What to try for ``target``, in order. Only FP32 models that share no weights are gone on from."""
    structure = Stage(tuple(_shrink(speedup) for speedup in (1.5, 2.0, 2.0)), "climb")
    thinner = Stage((_trained("low-rank", "structure", "split_layers"),), "first")
    integers = Stage(
        (
            Move("int8", "precision", _int8, "int8"),
            Move("int8-mixed", "precision", _mixed, "int8"),
            _trained("int8-qat", "precision", "train_int8", "int8"),
        ),
        "first",
    )
    if target == "latency":
        return structure, thinner, integers
    sparse = Stage((_trained("prune", "sparsity", "prune_weights"),), "first")
    shared = Stage(
        tuple(_trained(f"share-{bits}", "sharing", "share_weights", bits=bits) for bits in (6, 5, 4, 3)), "descend"
    )
    return structure, sparse, shared, integers


def _shrink(speedup: float) -> Move:
    return _trained(f"shrink-{speedup:g}x", "structure", "shrink_to", speedup=speedup)


def _trained(name: str, kind: Kind, function: str, precision: str = "", **options: Any) -> Move:
    """A step of ``trained_moves.py``. Taking it raises EngineUnavailable where torch is not installed."""

    def make(workshop: Workshop, state: State) -> Artifact:
        made: Artifact = getattr(importlib.import_module(_TRAINED), function)(workshop, state, **options)
        return made

    return Move(name, kind, make, precision)


def _int8(workshop: Workshop, state: State) -> Artifact:
    return quantize_with(
        PtqRecipe(placement=_placement(workshop, state)), state.model, workshop.fitted, int8_scheme(workshop)
    )


def _mixed(workshop: Workshop, state: State) -> Artifact:
    """INT8 but for the groups that cost the most accuracy for the time they save."""
    prepared = equalized(state.model, workshop.fitted)
    statistics = collect(prepared, workshop.fitted.inputs)
    mixed = MixedModel(prepared, statistics, int8_scheme(workshop), _placement(workshop, state), Method.MSE)
    trials = Trials(mixed, workshop.held, workshop.threads)
    report = measure_sensitivity(trials, SensitivityOptions(budget_s=_RANKING_S))
    found = choose(trials, report, workshop.spending.allowance("precision"))
    if len(found.float_groups) == len(report.groups):
        raise Unsupported("every group of operators had to stay float")
    return found.artifact


def _placement(workshop: Workshop, state: State) -> Placement:
    statistics = collect(state.model, workshop.fitted.rows(0, 32))
    options = FastestOptions(threads=workshop.threads, budget_s=2.0)
    return fastest_placement(state.model, statistics, workshop.held, [int8_scheme(workshop)], options)[0].placement


def int8_scheme(workshop: Workshop) -> IntegerScheme:
    """The machine's; where size is the aim, one that runs anywhere, so that the bundle needs no second model."""
    scheme = integer_scheme(workshop.machine)
    return scheme if workshop.target == "latency" else msgspec.structs.replace(scheme, reduce_range=True)
