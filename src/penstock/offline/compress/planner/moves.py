"""The steps that a plan can take: each one call of a method, on the model of a state.

Steps that train are in ``trained_moves.py``, which needs torch and is imported when the first of them is taken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Attempt
from penstock.dataset import Dataset
from penstock.errors import EngineUnavailable, ResourceExhausted, Unsupported
from penstock.offline.compress.planner.budget import Kind, Spending
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.mixed import choose
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import FastestOptions, fastest_placement
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, equalized, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme
from penstock.offline.compress.sharing.bits import BitsOptions, choose_bits
from penstock.offline.compress.sharing.share import share as share_weights
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.judge.judge import Judge
from penstock.resources import MachineFacts

Target = Literal["latency", "size"]

_TRAINED = "penstock.offline.compress.planner.trained_moves"
_PLACING_S, _RANKING_S, _CHOICE_S = 2.0, 5.0, 15.0
"""Seconds for timing placements, for timing groups, and for choosing ranges tensor by tensor."""
_SHARING_ROWS = 32, 512, 1 << 22
"""Samples on which bits are chosen, a few runs over them for each layer: at least, at most, and of how many values in all."""


class Workshop(msgspec.Struct, frozen=True):
    """What steps work with."""

    start: Artifact
    """The model that the plan starts from, which trained models learn to answer as."""
    fitted: Dataset
    """Samples to calibrate and train on."""
    judge: Judge
    """Judges against the original on samples that no step has trained on."""
    multiple: int
    """Samples that the model takes at a time."""
    machine: MachineFacts
    threads: int
    epochs: float
    seed: int
    spending: Spending
    target: Target
    scratch: Path
    """A folder for the progress of the steps of one stage."""
    on_progress: Progress = no_progress
    """Raises DeadlineExceeded where a step is to be broken off."""
    is_over: Callable[[], bool] = lambda: False
    """Whether a step that can is to end with what it has."""
    placements: dict[str, QdqPlacement] = {}
    """Known already, by the digest of the model."""


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
    cures: Literal["", "inaccurate"] = ""
    """What came of an earlier step of its stage where alone this one makes sense; empty if it always does."""


def trained(
    name: str, kind: Kind, function: str, precision: str = "", cures: Literal["", "inaccurate"] = "", **options: Any
) -> Move:
    """A step of ``trained_moves.py``. Taking it raises EngineUnavailable where torch is not installed."""

    def make(workshop: Workshop, state: State) -> Artifact:
        made: Artifact = getattr(importlib.import_module(_TRAINED), function)(workshop, state, **options)
        return made

    return Move(name, kind, make, precision, cures)


def int8(workshop: Workshop, state: State) -> Artifact:
    """Post-training quantisation as careful as can be, in the placement that is fastest here."""
    return quantize_with(
        PtqRecipe(placement=placement(workshop, state), choice=_choice(workshop)),
        state.model,
        workshop.fitted,
        int8_scheme(workshop),
        workshop.on_progress,
    )


def mixed(workshop: Workshop, state: State) -> Artifact:
    """INT8 but for the groups that cost the most accuracy for the time they save."""
    prepared = equalized(state.model, workshop.fitted)
    statistics = collect(prepared, workshop.fitted)
    model = MixedModel(prepared, statistics, int8_scheme(workshop), placement(workshop, state), RangeMethod.MSE)
    trials = Trials(model, workshop.judge)
    report = measure_sensitivity(trials, SensitivityOptions(budget_s=_RANKING_S), workshop.on_progress)
    found = choose(trials, report, workshop.spending.allowance("precision"))
    if len(found.float_groups) == len(report.groups):
        raise Unsupported("every group of operators had to stay float")
    return found.artifact


def share(error: float, loss: float) -> Callable[[Workshop, State], Artifact]:
    """A step: for the weights of each layer as few values as a relative ``error`` of the answers bears, and ``loss``, as a share of
    what the contract allows; then trained if they can be."""

    def make(workshop: Workshop, state: State) -> Artifact:
        lost = loss * workshop.spending.allowance("sharing").max_accuracy_loss
        options = BitsOptions(max_relative_error=error, max_accuracy_loss=lost, threads=workshop.threads)
        rows = _some(workshop.fitted, workshop.multiple)
        bits = choose_bits(state.model, rows, options, on_progress=workshop.on_progress)
        shared = share_weights(state.model, bits)
        try:
            made: Artifact = importlib.import_module(_TRAINED).tune_shared(workshop, state, shared)
        except (EngineUnavailable, Unsupported, ResourceExhausted):
            return shared  # only less accurate without
        return made

    return make


def placement(workshop: Workshop, state: State) -> QdqPlacement:
    """Where integers are fastest on this machine."""
    known = workshop.placements
    if state.model.digest not in known:
        statistics = collect(state.model, workshop.fitted.rows(0, 32))
        options = FastestOptions(threads=workshop.threads, budget_s=_PLACING_S)
        timed = fastest_placement(state.model, statistics, workshop.judge.data, [int8_scheme(workshop)], options)
        known[state.model.digest] = timed[0].placement
    return known[state.model.digest]


def int8_scheme(workshop: Workshop) -> IntegerScheme:
    """The machine's; where size is the aim, one that runs anywhere, so that the bundle needs no second model."""
    scheme = integer_scheme(workshop.machine)
    return scheme if workshop.target == "latency" else msgspec.structs.replace(scheme, reduce_range=True)


def _some(data: Dataset, multiple: int) -> Dataset:
    """Fewer samples where they are large, which takes time."""
    least, most, values = _SHARING_ROWS
    row = sum(array.size for array in data.inputs.values()) // data.count
    rows = max(least, min(most, values // max(1, row)))
    return data if data.count <= rows else data.split(1 - rows / data.count, multiple)[0]


def _choice(workshop: Workshop) -> RangeChoiceOptions:
    return RangeChoiceOptions(time_s=_CHOICE_S, threads=workshop.threads)
