"""Compare the speed of several ways to do one thing, on a machine that is never quiet.

The rules: all ways run interleaved in one process, in short bursts and in changing order, so that a disturbance hits all
alike; the first rounds are dropped; what is reported is a ratio with a bootstrap confidence interval over rounds, since
rounds are what the disturbance correlates within (block bootstrap, Künsch 1989); load and steal are read before and
after, and a disturbed measurement says so.
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

from penstock.bundle.evidence import Conditions, Interval
from penstock.clock import Clock, SystemClock
from penstock.engines.base import LoadedModel
from penstock.tensor import Array

Run = Callable[[], object]

WARM_UP_ROUNDS = 3
_PROBES = 3
_BURST_SECONDS = 0.002
_REST_SECONDS = 0.001
_MAX_BURST = 20
_MIN_ROUNDS = 7
FEWEST_CALLS = _PROBES + WARM_UP_ROUNDS + _MIN_ROUNDS
"""Calls of every way that ``interleave`` makes, however small its budget."""
_MAX_ROUNDS = 400
_FIRST_LOOK = 12
"""Rounds after which it is first asked whether the ratios are precise enough."""
_TAIL_CALLS = 300
_RESAMPLES = 1000
_DIRTY_STEAL_PERCENT = 5.0
_DIRTY_LOAD_PER_CORE = 1.5
_SYSTEM_CLOCK = SystemClock()


class Timings(msgspec.Struct, frozen=True):
    """The latencies of one way: ``seconds[round, call]``."""

    seconds: Array

    @property
    def p50_ms(self) -> float:
        """Median of the rounds' medians, of which ``speedup`` is the ratio."""
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
    """Time ``runs`` against one another within about ``budget_s`` seconds, at least seven rounds each.

    With ``precision`` timing ends early, once the ratio of every run to the first is known to that share, 0.01 for 1 %, at 95 %
    confidence, and every run has 300 calls, which a p99 needs. The rule looks at the width of the intervals and not at the ratios,
    so that they stay honest (Chow and Robbins, "On the asymptotic theory of fixed-width sequential confidence intervals", 1965).
    A round runs every way once: a burst of some two milliseconds, at least one call. The first call of a longer burst
    finds cold caches and is dropped. Before each burst comes a rest, in which threads that the last way left spinning
    fall asleep; otherwise they would take the cores of the next one.
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
    """How many times faster ``other`` is than ``base``: ratio of medians, with a paired block-bootstrap interval.

    Both must come from one call of ``interleave``: round i of one is paired with round i of the other.
    """
    base_rounds, other_rounds = np.median(base.seconds, axis=1), np.median(other.seconds, axis=1)
    count = len(base_rounds)
    picks = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    ratios = np.median(base_rounds[picks], axis=1) / np.median(other_rounds[picks], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Interval(float(np.median(base_rounds) / np.median(other_rounds)), float(low), float(high))


class ConditionsWatch:
    """Reads load and steal when made; ``finish`` reads them again."""

    def __init__(self, cores: int, proc: Path = Path("/proc")) -> None:
        self._cores, self._proc = cores, proc
        self._load = _load(proc)
        self._steal, self._total = _steal(proc)

    def finish(self) -> Conditions:
        """How quiet the machine was since this watch was made. Our own work counts as one busy core per core."""
        load = _load(self._proc)
        steal, total = _steal(self._proc)
        percent = 100 * (steal - self._steal) / max(1, total - self._total)
        dirty = percent > _DIRTY_STEAL_PERCENT or self._load > _DIRTY_LOAD_PER_CORE * self._cores
        return Conditions(round(self._load, 2), round(load, 2), round(percent, 2), dirty)


def feed(model: LoadedModel, inputs: Mapping[str, Array]) -> Run:
    """A run of ``model.forward(inputs)``."""
    return lambda: model.forward(inputs)


def repeat_rows(inputs: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """``rows`` samples from ``inputs``, starting again from the first where there are not enough."""
    return {
        name: np.ascontiguousarray(np.take(array, np.arange(rows) % len(array), axis=0))
        for name, array in inputs.items()
    }


def _is_precise(seconds: Sequence[Sequence[Sequence[float]]], precision: float) -> bool:
    """Whether each run, by its rounds, has calls enough and a median ratio to the first run that is known to ``precision``.

    The 95 % interval of a median lies between order statistics, ``count / 2 ± 0.98 √count``.
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
    """Calls per burst: one, or one more than fit into the burst's time, of which the first will be dropped."""
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
    """Load average over the last minute."""
    try:
        return float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]


def _steal(proc: Path) -> tuple[int, int]:
    """Jiffies stolen by other guests and jiffies in all, since boot; zeros where the kernel does not tell."""
    try:
        fields = [int(field) for field in (proc / "stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return 0, 0
    return (fields[7] if len(fields) > 7 else 0), sum(fields[:8])
