"""Time integer types and placements on this machine, to find the fastest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, Unsupported
from penstock.measurement import Interval
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement, nothing_to_quantise
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme
from penstock.offline.judge.race import race
from penstock.offline.sessions import call_rows, signature_of
from penstock.perf.measure import speedup
from penstock.resources import MachineFacts
from penstock.tensor import DataType


class TimedPlacement(msgspec.Struct, frozen=True):
    """A placement and an integer scheme, with the measured speed of the resulting model."""

    placement: QdqPlacement
    scheme: IntegerScheme
    artifact: Artifact
    """The quantised model, with min-max ranges; ranges do not affect its speed."""
    p50_ms: float
    speedup: Interval
    """Speed relative to the float model, with its 95 % interval."""


def candidate_schemes(machine: MachineFacts) -> list[IntegerScheme]:
    """The scheme that ``integer_scheme`` selects for ``machine``, and the same scheme with the other signedness of activations.

    Excludes schemes whose products saturate on ``machine``, since saturation changes results without an error.
    """
    ruled = integer_scheme(machine)
    other = DataType.INT8 if ruled.activation is DataType.UINT8 else DataType.UINT8
    return [
        ruled,
        msgspec.structs.replace(ruled, activation=other, reason="for comparison: activations of other signedness"),
    ]


def fastest_placement(
    artifact: Artifact,
    statistics: Mapping[str, TensorStatistics],
    data: Dataset,
    schemes: Sequence[IntegerScheme],
    threads: int = 1,
    budget_s: float = 5.0,
) -> list[TimedPlacement]:
    """Time every QDQ placement with each of ``schemes``, and return the results, fastest first.

    ``budget_s`` is the total time in seconds. Calls are interleaved with calls of the float model. Identical models are timed once.
    INT8 is faster than FP32 if the whole interval of a speed-up is above 1. Raises the errors of ``quantize``.
    """
    if not schemes:
        raise InvalidArgument("'schemes' is empty: nothing can be timed", "give candidate_schemes(machine_facts())")
    ways: dict[str, tuple[QdqPlacement, IntegerScheme, Artifact]] = {}
    for scheme in schemes:
        chosen = ranges(statistics, RangeMethod.MIN_MAX, scheme)
        for placement in QdqPlacement:
            # If no product of a model has weights, only the wide placement makes it integer.
            with contextlib.suppress(Unsupported):
                quantised = quantize(artifact, chosen, scheme, placement)
                ways.setdefault(quantised.digest, (placement, scheme, quantised))
    if not ways:
        raise nothing_to_quantise()
    models = {"": artifact, **{name: way[2] for name, way in ways.items()}}
    timings = race(models, data.mix(call_rows(signature_of(artifact), 1)), budget_s, threads)
    timed = [
        TimedPlacement(*way, timings[name].p50_ms, speedup(timings[""], timings[name])) for name, way in ways.items()
    ]
    return sorted(timed, key=lambda one: one.p50_ms)
