"""Measure the time that INT8 saves in each group. Calls are interleaved with calls of the INT8 model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.compress.precision.trials import Trials
from penstock.perf.measure import Timings, speedup

_INT8 = ""
"""Name of the INT8 model in a race. Other versions are named after groups."""
_MOST_TOGETHER = 12
"""Number of versions timed in one block together with the INT8 model. In a longer block, the machine's speed could change."""


class Savings(msgspec.Struct, frozen=True):
    """The savings of the groups that were timed."""

    int8_ms: float | None
    """Median latency of one call of the INT8 model; None if nothing was timed."""
    saving_ms: dict[str, Interval]
    """By group: the latency with the group in float minus the latency of the INT8 model, with the 95 % interval over paired rounds."""
    unpaying: tuple[str, ...]
    """Groups for which the measurements prove that INT8 saves no time, neither in each group alone nor in all of them together."""


def measure_savings(trials: Trials, names: Sequence[str], rows: int, budget_s: float, memory_bytes: int) -> Savings:
    """Time the groups ``names`` in this order for about ``budget_s`` seconds. Groups that do not fit into this time stay untimed.

    Loads as many versions at once as fit into ``memory_bytes`` by the engine's estimate, but at least two.
    """
    size = get_engine("onnxruntime").estimate(trials.mixed.artifact, {"threads": trials.judge.threads}).memory_bytes
    together = min(_MOST_TOGETHER, max(1, memory_bytes // size - 1))
    rounds: list[_Round] = []
    for start in range(0, len(names), together):
        if sum(one.seconds for one in rounds) >= budget_s:
            break
        block = names[start : start + together]
        rounds.append(_time(trials, [[name] for name in block], rows, budget_s * len(block) / len(names)))
    saving_ms = {name: saving for one in rounds for name, saving in one.saving_ms.items()}
    unpaying = [name for name, saving in saving_ms.items() if saving.high <= 0]
    if len(unpaying) > 1:
        # Neighbouring float groups share conversions, so savings do not add up.
        rounds.append(_time(trials, [unpaying], rows, 0.0))
        if rounds[-1].saving_ms[unpaying[0]].high > 0:
            unpaying = [min(unpaying, key=lambda name: saving_ms[name].value)]
    int8_ms = float(np.median([one.int8_ms for one in rounds])) if rounds else None
    return Savings(int8_ms, saving_ms, tuple(unpaying))


class _Round(NamedTuple):
    """The result of timing some versions against the INT8 model."""

    int8_ms: float
    saving_ms: dict[str, Interval]
    """The keys are the first float group of each version."""
    seconds: float


def _time(trials: Trials, versions: Sequence[Sequence[str]], rows: int, budget_s: float) -> _Round:
    """Time ``versions`` for about ``budget_s`` seconds. A version is given by its float groups."""
    mixed = trials.mixed
    models = {_INT8: mixed.with_float(), **{floats[0]: mixed.with_float(floats) for floats in versions}}
    start = time.perf_counter()
    found = trials.judge.race(models, budget_s, rows)
    seconds = time.perf_counter() - start
    saving_ms = {floats[0]: _saving(found[_INT8], found[floats[0]]) for floats in versions}
    return _Round(found[_INT8].p50_ms, saving_ms, seconds)


def _saving(int8: Timings, other: Timings) -> Interval:
    ratio = speedup(other, int8)
    low, value, high = (int8.p50_ms * (share - 1) for share in (ratio.low, ratio.value, ratio.high))
    return Interval(value, low, high)
