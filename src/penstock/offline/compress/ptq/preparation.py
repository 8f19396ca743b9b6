"""The first steps of every INT8 method: equalise channels, and find the fastest placement on this machine."""

from __future__ import annotations

from typing import Literal

from penstock.artifact import Artifact
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement, nothing_to_quantise
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import equalized
from penstock.offline.sessions import signature_of

MethodName = Literal["best", "min-max", "percentile", "mse", "entropy"]
PlacementName = Literal["fastest", "linear", "wide"]
RANGE_METHODS = {method.value: method for method in RangeMethod}
"""Range methods by name. ``best``, which tries all of them tensor by tensor, is not included."""
_ROWS = 32
"""Samples that give the ranges of the placements to time."""


def check_float(model: Artifact) -> None:
    """Raise Unsupported if ``model`` is already quantised or has no weights."""
    if not any(len(weight.dims) >= 2 for weight in FloatModel(model).weights.values()):
        raise nothing_to_quantise()


def prepared(model: Artifact, context: StepContext, equalize: bool) -> Artifact:
    """``model``, with channels of like ranges if ``equalize`` is true."""
    if not equalize:
        return model
    progress = context.stage("equalise")
    model = equalized(model, context.data)
    progress(1, 1)
    return model


def placed(model: Artifact, context: StepContext, name: PlacementName, threads: int, budget_s: float) -> QdqPlacement:
    """The placement called ``name``; for "fastest", the one that this machine runs fastest."""
    if name != "fastest":
        return QdqPlacement(name)
    known = context.placements
    if model.digest not in known:
        progress = context.stage("place")
        rows = signature_of(model).smallest_batch
        statistics = collect(model, context.data.rows(0, max(rows, _ROWS // rows * rows)))
        timed_on = context.judge.data if context.judge else context.data
        timed = fastest_placement(model, statistics, timed_on, [context.scheme], threads, budget_s)
        known[model.digest] = timed[0].placement
        progress(1, 1)
    return known[model.digest]
