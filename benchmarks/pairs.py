"""Two models against one another, each loaded anew several times.

Two loads of one model differ in speed by some percent, by the addresses and cores that they get, however long each is timed. The
load is therefore the unit: each gives one ratio, and the interval is Student's of their logarithms [T. Kalibera, R. Jones,
"Rigorous benchmarking in reasonable time", ISMM 2013]. Only the pair is alive, and warm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from scipy import stats

from penstock.measurement import Interval

Load = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Loads a model; the context gives a function for one call, and unloads at its end."""

_BLOCK_S = 0.004
_REST_S = 0.002
_WARM_UP_S = 0.03
LOADS = 8


def versus(base: Load, other: Load, seconds: float, loads: int = LOADS, seed: int = 0) -> Interval:
    """How many times as fast as ``base`` one call of ``other`` is, from ``loads`` fresh loads of both; ``seconds`` in all."""
    rng = random.Random(seed)
    return _student([_ratio(base, other, seconds / loads, rng) for _ in range(loads)])


def geometric_mean(ratios: Sequence[Interval]) -> Interval:
    """Of independent ratios, with its interval."""
    logs = np.log([[one.value, one.low, one.high] for one in ratios])
    spread = float(np.sqrt((np.abs(logs[:, 1:] - logs[:, :1]).max(axis=1) ** 2).sum())) / len(ratios)
    mean = float(logs[:, 0].mean())
    return Interval(*(float(np.exp(value)) for value in (mean, mean - spread, mean + spread)))


def _ratio(base: Load, other: Load, seconds: float, rng: random.Random) -> float:
    """Of the medians of blocks of calls, in the order ABBA."""
    with base() as first, other() as second:
        runs = [first, second]
        rng.shuffle(runs)
        calls = {run: _warm_up(run) for run in runs}
        found: dict[Callable[[], object], list[float]] = {run: [] for run in runs}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(found[first]) < 4:
            for run in (*runs, *reversed(runs)):
                time.sleep(_REST_S)  # threads of the other, which spin after a call, go to sleep
                run()
                found[run].append(_block(run, calls[run]))
        return float(np.median(found[first]) / np.median(found[second]))


def _warm_up(run: Callable[[], object]) -> int:
    """Call until it is warm; returns the calls of a block."""
    count, start = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - start < _WARM_UP_S:
        run()
        count += 1
    return max(1, round(_BLOCK_S / _block(run, max(1, count // 4))))


def _block(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _student(ratios: Sequence[float]) -> Interval:
    logs = np.log(ratios)
    half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5)
    mean = float(logs.mean())
    return Interval(*(float(np.exp(value)) for value in (mean, mean - half, mean + half)))
