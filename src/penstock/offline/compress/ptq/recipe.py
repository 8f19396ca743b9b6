"""All of post-training quantisation in one call: channels of like ranges, ranges, integers, biases."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.equalize import equalize
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import RangeChoiceOptions, choose_ranges
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.ptq.smooth_quant import smooth_quant
from penstock.offline.model_store import remembered

Progress = Callable[[int, int], None]


class PtqRecipe(msgspec.Struct, frozen=True):
    """The steps of a quantisation to INT8; every default is the most careful choice."""

    method: RangeMethod | None = None
    """How ranges are found; None for the method that harms the answers least, tensor by tensor."""
    placement: QdqPlacement = QdqPlacement.LINEAR
    equalize: bool = True
    """Give channels like ranges first: between layers, and where a normalisation feeds matrix products."""
    correct_biases: bool = True
    """Take back the shift of means that rounding makes."""
    keep_float: Collection[str] = ()
    """Nodes that stay float, by their names in a ``FloatModel``."""
    choice: RangeChoiceOptions = RangeChoiceOptions()
    """The cost allowed for the choice tensor by tensor."""


def quantize_with(
    recipe: PtqRecipe, artifact: Artifact, data: Dataset, scheme: IntegerScheme, progress: Progress = lambda *_: None
) -> Artifact:
    """``artifact`` (FP32, BatchNormalization folded) in INT8, calibrated on ``data``. ``progress`` counts the stages.

    Raises Unsupported if there is nothing to quantise, InvalidData if the data do not fit.
    """
    stages = 5
    progress(0, stages)
    prepared = equalized(artifact, data) if recipe.equalize else artifact
    progress(1, stages)
    statistics = collect(prepared, data)
    progress(2, stages)
    if recipe.method is None:
        found = choose_ranges(prepared, statistics, data, scheme, recipe.placement, recipe.choice).ranges
    else:
        found = ranges(statistics, recipe.method, scheme)
    progress(3, stages)
    quantised = quantize(prepared, found, scheme, recipe.placement, recipe.keep_float)
    progress(4, stages)
    if recipe.correct_biases and data.count > 1:
        quantised = correct_biases(prepared, quantised, data)
    progress(stages, stages)
    return quantised


def equalized(artifact: Artifact, data: Dataset) -> Artifact:
    """A model of the same function with channels of like ranges, by each method that applies to it."""
    key = artifact.digest, artifact.path, data.digest
    return remembered("equalized", key, lambda: _equalized(artifact, data), artifact.size_bytes)


def _equalized(artifact: Artifact, data: Dataset) -> Artifact:
    for method in (equalize, smooth_quant):
        try:
            artifact = method(artifact, data)
        except (Unsupported, InvalidData):
            continue  # INT8 is only less accurate without
    return artifact
