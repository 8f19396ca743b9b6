"""Fuzzes quantisation: a model is refused, or without rounding, it is the original; in 16 bits, there is hardly any error."""

from __future__ import annotations

from random import Random

import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.explained import distance
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.storage import StorageOptions, store_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme, symmetric
from penstock.resources import machine_facts
from tests.fine_integers import LARGEST_ERROR, quantize_finely
from tests.fuzz.offline import ModelTarget, answers, check_compressed, data_of, optimized
from tests.random_models import RandomModel

_NEGLIGIBLE = 1e-4
_SYMMETRIC = 0.25


class QuantizerTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        data = data_of(model, artifact)
        if model.float is np.float32:
            _check_finely(optimized(artifact), data, model.fixed_rows or data.count, Random(artifact.digest))
        check_compressed(artifact, _quantized(artifact, data, Random(artifact.digest)), data)


def _check_finely(artifact: Artifact, data: Dataset, rows: int, random: Random) -> None:
    """Assert that 16 bits give nearly the model's own outputs. The check below does not judge the ranges of activations."""
    try:
        made = quantize_finely(artifact, data, random.choice(list(QdqPlacement)))
    except Unsupported:
        return
    want, got = (answers(one, data.rows(0, rows)) for one in (artifact, made))
    for name, array in want.items():
        error = distance(array, got[name], _NEGLIGIBLE * float(np.square(array.astype(np.float64)).mean()))
        assert error <= LARGEST_ERROR, f"output {name} in 16 bits is off by {error:.2%}"


def _quantized(artifact: Artifact, data: Dataset, random: Random) -> Artifact:
    """``artifact``, quantised by one of the methods."""
    start, scheme = optimized(artifact), integer_scheme(machine_facts())
    if random.random() < _SYMMETRIC:
        scheme = symmetric(scheme)
    match random.choice(["int8", "int8", "int8", "recipe", "dynamic", "weights", "half", "stored"]):
        case "int8":
            placement, method = random.choice(list(QdqPlacement)), random.choice(list(RangeMethod))
            return quantize(start, ranges(collect(start, data), method, scheme), scheme, placement)
        case "recipe":
            return quantize_with(PtqRecipe(placement=random.choice(list(QdqPlacement))), start, data, scheme)
        case "dynamic":
            return quantize_dynamic(start, data, DynamicOptions(least_weights=1))
        case "weights":
            bits: int = random.choice([4, 8])
            options = WeightOnlyOptions(bits=bits, block_size=16, least_weights=1)  # type: ignore[arg-type]
            return quantize_weights(start, data, options)
        case "stored":
            return store_weights(start, StorageOptions(table_bits=random.choice([4, 8]), least_weights=1))
        case _:
            return halve_weights(start, HalfOptions(random.choice(["fp16", "bf16"]), least_weights=1))
