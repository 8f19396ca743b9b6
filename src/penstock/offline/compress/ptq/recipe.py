"""Post-training quantisation in one call: equalise channels, choose ranges, quantise, correct biases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.fp32.fp32 import in_fp32
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.equalize import equalize
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement, float_model, nothing_to_quantise
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions, choose_ranges
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.ptq.smooth_quant import smooth_quant
from penstock.offline.compress.reconstruct.reconstruction import reconstruct
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.deadline import IsLate, never_late
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import mean_interval, sample_errors
from penstock.offline.model_store import remembered
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

Equalisation = Callable[[Artifact, Dataset], Artifact]
MethodName = Literal["best", "min-max", "percentile", "mse", "entropy"]
PlacementName = Literal["fastest", "linear", "attention", "wide"]
RANGE_METHODS = {method.value: method for method in RangeMethod}
"""Range methods by name. ``best`` is not included, since it tries all methods for each tensor."""
_WORTH_IT = 0.1
"""Minimum fraction of the error that equalisation must provably save. Sampling of the data alone changes errors by about this much."""
_ROWS = 32
"""Number of calibration samples for the ranges of placements that are timed."""
_JUDGED = 64
"""Maximum number of calibration samples on which equalisation is judged."""


class PtqRecipe(msgspec.Struct, frozen=True):
    """The options of a quantisation to INT8. The defaults give the best accuracy."""

    method: RangeMethod | None = None
    """The method that chooses ranges. If None, each tensor gets the method with the least error of the outputs."""
    placement: QdqPlacement = QdqPlacement.LINEAR
    equalize: bool = True
    """First give channels similar ranges: between layers, and after normalisations that feed matrix products."""
    reconstruct: bool = True
    """Round weights so that the error of each layer's results is small, instead of the error of each weight."""
    correct_biases: bool = True
    """Correct biases for the shift of the layers' means that rounding causes."""
    choice: RangeChoiceOptions = RangeChoiceOptions()
    """Limits on the cost of choosing a range method for each tensor."""
    reconstruct_s: float = inf
    """Time limit in seconds for rounding weights. The result then depends on the machine."""


def quantize_with(
    recipe: PtqRecipe,
    artifact: Artifact,
    data: Dataset,
    scheme: IntegerScheme,
    progress: Progress = no_progress,
    written: IntegerScheme | None = None,
    is_late: IsLate = never_late,
) -> Artifact:
    """``artifact`` (FP32, BatchNormalization folded) in INT8, calibrated on ``data``. ``progress`` counts the six stages.

    The ranges are chosen for ``scheme``. The model is written with ``written``, by default the same scheme. Equalisation,
    reconstruction and bias correction end early once ``is_late``.
    Raises Unsupported if there is nothing to quantise, InvalidData if the data do not fit.
    """
    stages = 6
    progress(0, stages)
    prepared = equalized(artifact, data, scheme, is_late) if recipe.equalize else artifact
    progress(1, stages)
    statistics = collect(prepared, data)
    progress(2, stages)
    if recipe.method is None:
        found = choose_ranges(prepared, statistics, data, scheme, recipe.placement, recipe.choice).ranges
    else:
        found = ranges(statistics, recipe.method, scheme)
    progress(3, stages)
    quantised = quantize(prepared, found, written or scheme, recipe.placement)
    progress(4, stages)
    if recipe.reconstruct and not is_late():
        with contextlib.suppress(Unsupported):  # outputs without a batch axis
            quantised = reconstruct(prepared, quantised, data, recipe.reconstruct_s)
    progress(5, stages)
    if recipe.correct_biases and data.count > 1 and not is_late():
        with contextlib.suppress(Unsupported):  # products of two activations have no biases
            quantised = correct_biases(prepared, quantised, data, is_late)
    progress(stages, stages)
    return quantised


def equalized(artifact: Artifact, data: Dataset, scheme: IntegerScheme, is_late: IsLate = never_late) -> Artifact:
    """Give channels similar ranges, by each method that lowers the error on held-out rows. The model's function stays the same.

    Once ``is_late``, no further method is tried.
    """
    key = artifact.digest, artifact.path, data.digest, scheme
    return remembered("equalized", key, lambda: _equalized(artifact, data, scheme, is_late), artifact.size_bytes)


def _equalized(artifact: Artifact, data: Dataset, scheme: IntegerScheme, is_late: IsLate) -> Artifact:
    rows = signature_of(artifact).smallest_batch
    some = data.few(max(2 * rows, _JUDGED), rows)
    for method in (equalize, smooth_quant):
        if is_late():
            break
        # INT8 also works without equalisation, but less accurately.
        with contextlib.suppress(Unsupported, InvalidData):
            if _is_worth_it(artifact, method, some, scheme):
                artifact = method(artifact, data)
    return artifact


def _is_worth_it(artifact: Artifact, method: Equalisation, data: Dataset, scheme: IntegerScheme) -> bool:
    """True if ``method`` provably lowers the error. Each half of the data is judged with ranges from the other half."""
    gains, before = list[Array](), list[Array]()
    halves = data.split_evenly(2, signature_of(artifact).smallest_batch)
    for fit, held_out in (halves, halves[::-1]):
        key = artifact.digest, fit.digest, held_out.digest, scheme
        plain = partial(_errors, artifact, artifact, fit, held_out, scheme)
        before.append(remembered("errors", key, plain, 8 * held_out.count))
        gains.append(before[-1] - _errors(artifact, method(artifact, fit), fit, held_out, scheme))
        if gains[-1].mean() <= _WORTH_IT * before[-1].mean():
            return False
    return bool(mean_interval(np.concatenate(gains)).low > _WORTH_IT * np.concatenate(before).mean())


def _errors(original: Artifact, model: Artifact, fit: Dataset, held_out: Dataset, scheme: IntegerScheme) -> Array:
    """The relative error of each sample of ``held_out`` for ``model`` in INT8, with ranges from ``fit``."""
    found = ranges(collect(model, fit), RangeMethod.MSE, scheme)
    reference = answers_of(original, held_out, as_written=True)
    return sample_errors(reference, answers_of(quantize(model, found, scheme), held_out, as_written=True))


def check_float(model: Artifact) -> None:
    """Raise Unsupported if ``model`` cannot be converted to FP32, is already quantised, or has neither weights nor products."""
    known = float_model(in_fp32(model))
    has_weights = any(len(weight.dims) >= 2 for weight in known.weights.values())
    if not has_weights and not known.integer_nodes(QdqPlacement.WIDE):
        raise nothing_to_quantise()


def prepared(model: Artifact, context: StepContext, equalize: bool) -> Artifact:
    """``model``, with channels of similar ranges if ``equalize`` is true."""
    if not equalize:
        return model
    progress = context.stage("equalise")
    model = equalized(model, context.data, context.scheme)
    progress(1, 1)
    return model


def placed(model: Artifact, context: StepContext, name: PlacementName, threads: int, budget_s: float) -> QdqPlacement:
    """The placement called ``name``; for "fastest", the placement that is fastest on this machine."""
    if name != "fastest":
        return QdqPlacement(name)
    known = context.placements
    if model.digest not in known:
        progress = context.stage("place")
        rows = signature_of(model).smallest_batch
        statistics = collect(model, context.data.part(0, max(rows, _ROWS // rows * rows)))
        timed_on = context.judge.data if context.judge else context.data
        timed = fastest_placement(model, statistics, timed_on, [context.scheme], threads, budget_s)
        known[model.digest] = timed[0].placement
        progress(1, 1)
    return known[model.digest]
