"""The first steps of every INT8 method: channels of like ranges, and the placement that is fastest on this machine."""

from __future__ import annotations

from typing import Literal

from penstock.artifact import Artifact
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import FastestOptions, fastest_placement
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement, nothing_to_quantise
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import equalized
from penstock.offline.sessions import signature_of

MethodName = Literal["best", "min-max", "percentile", "mse", "entropy"]
PlacementName = Literal["fastest", "linear", "wide"]
RANGE_METHODS = {method.value: method for method in RangeMethod}
"""Range methods by name; ``best``, which tries all tensor by tensor, is not one of them."""
_ROWS = 32
"""Samples that give the ranges with which placements are timed."""


def check_float(model: Artifact) -> None:
    """Raise Unsupported if ``model`` is quantised already or has no weights."""
    if not any(len(weight.dims) >= 2 for weight in FloatModel(model).weights.values()):
        raise nothing_to_quantise()


def prepared(model: Artifact, context: StepContext, equalize: bool) -> Artifact:
    """``model`` with channels of like ranges if ``equalize``."""
    if not equalize:
        return model
    progress = context.stage("equalise")
    model = equalized(model, context.data)
    progress(1, 1)
    return model


def placed(model: Artifact, context: StepContext, name: PlacementName, threads: int, budget_s: float) -> QdqPlacement:
    """The placement of that name, or the one that this machine runs fastest."""
    if name != "fastest":
        return QdqPlacement(name)
    known = context.placements
    if model.digest not in known:
        progress = context.stage("place")
        rows = signature_of(model).smallest_batch
        statistics = collect(model, context.data.rows(0, max(rows, _ROWS // rows * rows)))
        timed_on = context.judge.data if context.judge else context.data
        options = FastestOptions(threads=threads, budget_s=budget_s)
        known[model.digest] = fastest_placement(model, statistics, timed_on, [context.scheme], options)[0].placement
        progress(1, 1)
    return known[model.digest]
