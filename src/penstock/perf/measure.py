"""Compare the speed of several functions on a machine with other load.

All functions run interleaved in one process, in short bursts and in random order, so that a disturbance affects all functions
alike. The first rounds are dropped. The result is a ratio with a bootstrap confidence interval over rounds, because disturbances
correlate within a round (block bootstrap, Künsch 1989). The machine's load and steal time, before and after, show whether other
processes disturbed the measurement.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.clock import Clock, SystemClock
from penstock.engines.base import LoadedModel
from penstock.measurement import Conditions, Interval
from penstock.tensor import Array

Run = Callable[[], object]

WARM_UP_ROUNDS = 3
_PROBES = 3
_BURST_SECONDS = 0.002
_REST_SECONDS = 0.001
_MAX_BURST = 20
_MIN_ROUNDS = 7
FEWEST_CALLS = _PROBES + WARM_UP_ROUNDS + _MIN_ROUNDS
"""Minimum number of calls of each function in ``interleave``."""
_MAX_ROUNDS = 400
_FIRST_LOOK = 12
"""Number of rounds before the first check of the precision."""
_TAIL_CALLS = 300
_RESAMPLES = 1000
_DIRTY_STEAL_PERCENT = 5.0
_DIRTY_LOAD_PER_CORE = 1.5
_SYSTEM_CLOCK = SystemClock()


class Timings(msgspec.Struct, frozen=True):
    """Latencies of one function: ``seconds[round, call]``."""

    seconds: Array

    @property
    def p50_ms(self) -> float:
        """The median of the rounds' medians. ``speedup`` is the ratio of two such medians."""
        return float(np.median(np.median(self.seconds, axis=1))) * 1e3

    @property
    def p99_ms(self) -> float:
        return self.percentile_ms(99)

    def percentile_ms(self, percent: float) -> float:
        """Percentile over all calls, in milliseconds."""
        return float(np.percentile(self.seconds, percent)) * 1e3


def interleave(
    runs: Mapping[str, Run],
    budget_s: float,
    seed: int = 0,
    clock: Clock = _SYSTEM_CLOCK,
    precision: float = 0.0,
) -> dict[str, Timings]:
    """Time ``runs``, interleaved, within about ``budget_s`` seconds and in at least seven rounds.

    With ``precision`` (0.01 for 1 %), timing may end early. It ends when the ratio of every run's latency to the first run's is
    known to this precision at 95 % confidence, and every run has the 300 calls that a p99 needs. This rule depends on the widths
    of the confidence intervals but not on the ratios, so the intervals stay valid (Chow and Robbins, "On the asymptotic theory of
    fixed-width sequential confidence intervals", 1965).

    A round times a burst of calls, about two milliseconds long, of each run. If a burst has several calls, the first is dropped,
    because it starts with cold caches. A pause before each burst lets spinning threads of the previous run go idle.
    """
    rng = random.Random(seed)
    bursts = {name: _burst(run, clock.now) for name, run in runs.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    order = list(runs)
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        end, next_look = clock.now() + budget_s, _FIRST_LOOK
        for number in range(WARM_UP_ROUNDS + _MAX_ROUNDS):
            if number >= WARM_UP_ROUNDS + _MIN_ROUNDS and clock.now() > end:
                break
            if precision and number == WARM_UP_ROUNDS + next_look:
                next_look += max(1, next_look // 4)
                if _is_precise([rounds[WARM_UP_ROUNDS:] for rounds in seconds.values()], precision):
                    break
            rng.shuffle(order)
            for name in order:
                time.sleep(_REST_SECONDS)
                seconds[name].append(_time_burst(runs[name], bursts[name], clock.now))
    finally:
        if gc_was_on:
            gc.enable()
    return {name: Timings(np.array(rounds[WARM_UP_ROUNDS:])) for name, rounds in seconds.items()}


def speedup(base: Timings, other: Timings, confidence: float = 0.95, seed: int = 0) -> Interval:
    """The speed of ``other`` relative to ``base``: the ratio of medians, with a paired block-bootstrap interval.

    Both timings must come from the same call of ``interleave``, because their rounds are paired.
    """
    base_rounds, other_rounds = np.median(base.seconds, axis=1), np.median(other.seconds, axis=1)
    count = len(base_rounds)
    picks = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    ratios = np.median(base_rounds[picks], axis=1) / np.median(other_rounds[picks], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Interval(float(np.median(base_rounds) / np.median(other_rounds)), float(low), float(high))


class ConditionsWatch:
    """Measures load and steal time from construction to ``finish``."""

    def __init__(self, cores: int, proc: Path = Path("/proc")) -> None:
        self._cores, self._proc = cores, proc
        self._load = _load(proc)
        self._steal, self._total = _steal(proc)

    def finish(self) -> Conditions:
        """The machine's load since construction. Up to one busy process per core does not count as a disturbance."""
        load = _load(self._proc)
        steal, total = _steal(self._proc)
        percent = 100 * (steal - self._steal) / max(1, total - self._total)
        dirty = percent > _DIRTY_STEAL_PERCENT or self._load > _DIRTY_LOAD_PER_CORE * self._cores
        return Conditions(round(self._load, 2), round(load, 2), round(percent, 2), dirty)


def feed(model: LoadedModel, inputs: Mapping[str, Array]) -> Run:
    """A callable that runs ``model.forward(inputs)``."""
    return lambda: model.forward(inputs)


def repeat_rows(inputs: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """The first ``rows`` samples of ``inputs``, repeated if there are too few."""
    return {
        name: np.ascontiguousarray(np.take(array, np.arange(rows) % len(array), axis=0))
        for name, array in inputs.items()
    }


def _is_precise(seconds: Sequence[Sequence[Sequence[float]]], precision: float) -> bool:
    """True if each run has enough calls, and the median ratio of its latency to the first run's is known to ``precision``.

    The 95 % interval of a median lies between the order statistics of ranks ``count / 2 ± 0.98 √count``.
    """
    if min(sum(map(len, rounds)) for rounds in seconds) < _TAIL_CALLS:
        return False
    medians = np.array([[np.median(burst) for burst in rounds] for rounds in seconds])
    ratios = np.sort(medians / medians[0], axis=1)
    count = ratios.shape[1]
    reach = math.ceil(0.98 * math.sqrt(count))
    low, high = ratios[:, (count - 1) // 2 - reach], ratios[:, count // 2 + reach]
    return bool(((high - low) / 2 <= precision * np.median(ratios, axis=1)).all())


def _burst(run: Run, now: Callable[[], float]) -> int:
    """Number of calls per burst: as many as fit, plus one for the dropped first call. If only one call fits, the result is 1."""
    seconds = min(_time_burst(run, 1, now)[0] for _ in range(_PROBES))
    calls = int(_BURST_SECONDS / max(seconds, 1e-6))
    return min(calls + 1, _MAX_BURST) if calls > 1 else 1


def _time_burst(run: Run, calls: int, now: Callable[[], float]) -> list[float]:
    seconds = []
    for _ in range(calls):
        start = now()
        run()
        seconds.append(now() - start)
    return seconds[1:] if calls > 1 else seconds


def _load(proc: Path) -> float:
    """Load average of the last minute."""
    try:
        return float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]


def _steal(proc: Path) -> tuple[int, int]:
    """Jiffies that the hypervisor gave to other guests, and all jiffies, since boot; zeros if the kernel does not report them."""
    try:
        fields = [int(field) for field in (proc / "stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return 0, 0
    return (fields[7] if len(fields) > 7 else 0), sum(fields[:8])
