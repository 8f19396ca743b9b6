"""Two models against one another, each loaded anew several times.

Two loads of one model differ in speed by some percent, by the addresses and cores that they get, however long each is timed. The
load is therefore the unit: each gives one ratio, and the interval is Student's of their logarithms [T. Kalibera, R. Jones,
"Rigorous benchmarking in reasonable time", ISMM 2013]. Loads of one process get similar addresses, so each load has a process of its
own, with random padding. Only the pair is alive, and warm.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
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
_MOST_TIMES = 6
"""Maximum number of times that ``loads`` loads are measured to make an interval narrow."""
_MOST_PADDING = 1 << 20
_ENGINES = ("numpy", "onnxruntime", "openvino", "torch")

Ratios = Callable[[Load, Load, float, Sequence[int]], Sequence[float]]


def versus(
    base: Load,
    other: Load,
    seconds: float,
    loads: int = LOADS,
    seed: int = 0,
    ratios: Ratios | None = None,
    within: float = math.inf,
) -> Interval:
    """How many times as fast as ``base`` one call of ``other`` is, from ``loads`` fresh loads of both; ``seconds`` in all. The loads
    must be picklable, unless ``ratios`` measures them in this process.

    While half the relative width of the interval exceeds ``within``, another ``loads`` loads follow, at most five times. Only the
    spread of the ratios decides this, so the estimate is not biased. But the interval covers less often: in simulations, in 94 % of
    the cases instead of 95 %.
    """
    found: list[float] = []
    for start in range(seed, seed + _MOST_TIMES * loads, loads):
        found += (ratios or in_new_processes)(base, other, seconds / loads, range(start, start + loads))
        interval = _student(found)
        if math.log(interval.high / interval.low) / 2 <= within:
            break
    return interval


def in_new_processes(base: Load, other: Load, seconds: float, seeds: Sequence[int]) -> list[float]:
    """The ratio of one load for each of ``seeds``, each in a process that has only imported the engines."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_ENGINES, __name__])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        return [pool.submit(ratio, base, other, seconds, one).result() for one in seeds]


def geometric_mean(ratios: Sequence[Interval]) -> Interval:
    """Of independent ratios, with its interval."""
    logs = np.log([[one.value, one.low, one.high] for one in ratios])
    spread = float(np.sqrt((np.abs(logs[:, 1:] - logs[:, :1]).max(axis=1) ** 2).sum())) / len(ratios)
    mean = float(logs[:, 0].mean())
    return Interval(*(float(np.exp(value)) for value in (mean, mean - spread, mean + spread)))


def ratio(base: Load, other: Load, seconds: float, seed: int) -> float:
    """Of the medians of blocks of calls, in the order ABBA."""
    rng = random.Random(seed)
    padding = [bytes(rng.randrange(_MOST_PADDING))]
    with base() as first:
        padding.append(bytes(rng.randrange(_MOST_PADDING)))
        with other() as second:
            return _timed(first, second, seconds, rng)


def _timed(first: Callable[[], object], second: Callable[[], object], seconds: float, rng: random.Random) -> float:
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
