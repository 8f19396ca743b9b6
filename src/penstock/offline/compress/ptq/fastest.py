"""Integer types and placement, measured: the proposals of ``scheme.py`` timed on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.measurement import Interval
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme, integer_scheme
from penstock.offline.judge.race import race
from penstock.offline.sessions import call_rows, signature_of
from penstock.perf.measure import repeat_rows, speedup
from penstock.resources import MachineFacts
from penstock.tensor import DataType


class FastestOptions(msgspec.Struct, frozen=True):
    """How candidates are timed."""

    rows: int = 1
    """Samples in a timed call; a model of fixed batch takes its own."""
    threads: int = 1
    """Threads of the engine."""
    budget_s: float = 5.0
    """Seconds of timing, all candidates together."""
    engine: str = "onnxruntime"
    """The engine that will serve the model."""


class TimedPlacement(msgspec.Struct, frozen=True):
    """One way to quantise, and how fast it came out."""

    placement: QdqPlacement
    scheme: IntegerScheme
    artifact: Artifact
    """The quantised model, with min-max ranges: its speed does not depend on the ranges."""
    p50_ms: float
    speedup: Interval
    """Over the float model, with its 95 % interval."""


def candidate_schemes(machine: MachineFacts) -> list[IntegerScheme]:
    """The scheme that the rules give for ``machine``, and the other that keeps its sums exact there.

    None is offered whose products saturate: it would be fast, and wrong without a word.
    """
    ruled = integer_scheme(machine)
    other = DataType.INT8 if ruled.activation is DataType.UINT8 else DataType.UINT8
    return [
        ruled,
        msgspec.structs.replace(ruled, activation=other, reason="the other sign of activations, for comparison"),
    ]


def fastest_placement(
    artifact: Artifact,
    statistics: Mapping[str, TensorStatistics],
    data: Dataset,
    schemes: Sequence[IntegerScheme],
    options: FastestOptions | None = None,
) -> list[TimedPlacement]:
    """Every placement with every one of ``schemes``, calls interleaved with those of the float model, the fastest first.

    Where two placements write the same model, only the first is timed. The model to serve is the first whose interval is above 1;
    if none is, INT8 does not pay here. Raises as ``quantize``.
    """
    options = options or FastestOptions()
    if not schemes:
        raise InvalidArgument("there are no integer schemes to time", "give candidate_schemes(machine_facts())")
    ways: dict[str, tuple[QdqPlacement, IntegerScheme, Artifact]] = {}
    for scheme in schemes:
        chosen = ranges(statistics, RangeMethod.MIN_MAX, scheme)
        for placement in QdqPlacement:
            quantised = quantize(artifact, chosen, scheme, placement)
            ways.setdefault(quantised.digest, (placement, scheme, quantised))
    models = {"": artifact, **{name: way[2] for name, way in ways.items()}}
    sample = repeat_rows(data.inputs, call_rows(signature_of(artifact), options.rows))
    timings = race(models, sample, options.budget_s, options.threads, options.engine)
    timed = [
        TimedPlacement(*way, timings[name].p50_ms, speedup(timings[""], timings[name])) for name, way in ways.items()
    ]
    return sorted(timed, key=lambda one: one.p50_ms)
