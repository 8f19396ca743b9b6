"""Measure the time that the integers of each group save, in calls that interleave with those of the INT8 model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.compress.precision.trials import Trials
from penstock.perf.measure import Timings, speedup

_INT8 = ""
"""The INT8 model's name in a race. Other versions are named after groups."""
_MOST_TOGETHER = 12
"""Versions timed in one block: enough to share the timing of the INT8 model, few enough to run under the same conditions."""


class Savings(msgspec.Struct, frozen=True):
    """The savings of the groups that were timed."""

    int8_ms: float | None
    """Median latency of one call of the INT8 model; None if nothing was timed."""
    saving_ms: dict[str, Interval]
    """By group, latency with it float less that of the INT8 model, with the 95 % interval of the paired rounds."""
    unpaying: tuple[str, ...]
    """Groups that are significantly no slower in float, each alone and all together."""


def measure_savings(trials: Trials, names: Sequence[str], rows: int, budget_s: float, memory_bytes: int) -> Savings:
    """Time the groups ``names`` in this order for about ``budget_s`` seconds. When the time is over, the rest stays untimed.

    Loads as many versions at a time as fit ``memory_bytes`` by the engine's estimate, at least two.
    """
    clock = _Stopwatch(trials, rows)
    options = {"threads": trials.judge.threads}
    size = get_engine("onnxruntime").estimate(trials.mixed.artifact, options).memory_bytes
    together = min(_MOST_TOGETHER, max(1, memory_bytes // size - 1))
    saving_ms: dict[str, Interval] = {}
    for start in range(0, len(names), together):
        if clock.spent >= budget_s:
            break
        block = names[start : start + together]
        saving_ms |= clock.time([[name] for name in block], budget_s * len(block) / len(names))
    return Savings(clock.int8_ms, saving_ms, _unpaying(clock, saving_ms))


def _unpaying(clock: _Stopwatch, saving_ms: dict[str, Interval]) -> tuple[str, ...]:
    """The groups without a saving. Float neighbours share conversions, so savings do not add up, and these are timed together."""
    found = [name for name, saving in saving_ms.items() if saving.high <= 0]
    if len(found) < 2:
        return tuple(found)
    (together,) = clock.time([found], 0.0).values()
    return tuple(found) if together.high <= 0 else (min(found, key=lambda name: saving_ms[name].value),)


class _Stopwatch:
    """Times versions against the INT8 model."""

    def __init__(self, trials: Trials, rows: int) -> None:
        self._trials, self._rows = trials, rows
        self._int8_ms: list[float] = []
        self.spent = 0.0

    @property
    def int8_ms(self) -> float | None:
        return float(np.median(self._int8_ms)) if self._int8_ms else None

    def time(self, versions: Sequence[Sequence[str]], budget_s: float) -> dict[str, Interval]:
        """The milliseconds that each of ``versions``, lists of float groups, loses, by the name of its first group."""
        mixed = self._trials.mixed
        models = {_INT8: mixed.with_float(), **{floats[0]: mixed.with_float(floats) for floats in versions}}
        start = time.perf_counter()
        found = self._trials.judge.race(models, budget_s, self._rows)
        self.spent += time.perf_counter() - start
        self._int8_ms.append(found[_INT8].p50_ms)
        return {floats[0]: _saving(found[_INT8], found[floats[0]]) for floats in versions}


def _saving(int8: Timings, other: Timings) -> Interval:
    ratio = speedup(other, int8)
    low, value, high = (int8.p50_ms * (share - 1) for share in (ratio.low, ratio.value, ratio.high))
    return Interval(value, low, high)
