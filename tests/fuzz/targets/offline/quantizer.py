"""Fuzzes quantisation: a model is refused, or its error is what rounding explains."""

from __future__ import annotations

from random import Random

from penstock.artifact import Artifact
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.resources import machine_facts
from tests.fuzz.offline import ModelTarget, data_of, optimized
from tests.random_models import RandomModel


class QuantizerTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        start, random = optimized(artifact), Random(artifact.digest)
        data, scheme = data_of(model, artifact), integer_scheme(machine_facts())
        match random.choice(["int8", "int8", "int8", "recipe", "dynamic", "weights", "half"]):
            case "int8":
                placement, method = random.choice(list(QdqPlacement)), random.choice(list(RangeMethod))
                made = quantize(start, ranges(collect(start, data), method, scheme), scheme, placement)
            case "recipe":
                made = quantize_with(PtqRecipe(placement=random.choice(list(QdqPlacement))), start, data, scheme)
            case "dynamic":
                made = quantize_dynamic(start, data, DynamicOptions(least_weights=1))
            case "weights":
                bits: int = random.choice([4, 8])
                options = WeightOnlyOptions(bits=bits, block_size=16, least_weights=1)  # type: ignore[arg-type]
                made = quantize_weights(start, data, options)
            case _:
                made = halve_weights(start, HalfOptions(random.choice(["fp16", "bf16"]), least_weights=1))
        check_explained(artifact, made, data)
