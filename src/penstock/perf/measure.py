"""Time functions under the conditions of production (warm, one call after another), and compare their speed.

::

    load 1:  warm up a, b    a b b a a b b a ...    (blocks of calls)
    load 2:  warm up b, a    b a a b b a a b ...
    ...

A model's speed differs from load to load, because its memory and its threads are placed differently. More calls within one load do not
reveal this. So ``repeat`` times several loads, and ``speedup`` treats a load as one observation (T. Kalibera, R. Jones, "Rigorous
benchmarking in reasonable time", ISMM 2013).
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from penstock.clock import Clock, SystemClock
from penstock.engines.base import LoadedModel
from penstock.measurement import Interval, student
from penstock.tensor import Array

Run = Callable[[], object]
Turns = Run | Sequence[Run]
"""A function, or one function for each size. The sizes then take turns."""

LOADS = 8
"""Number of loads for a measurement that decides between candidates."""
FEWEST_LOADS = 3
_BLOCK_SECONDS, _SHORTEST_BLOCK_SECONDS = 0.02, 0.01
_WARM_UP_SECONDS = 0.01
_WARM_UP_CALLS = 3
_FEWEST_ROUNDS = 2
_COLD_SHARE = 10
"""A tenth of a block's calls, at least one, is dropped: caches are cold after a pause. If a call outlasts a block, none is."""
_REST_SECONDS = 0.002
_SYSTEM_CLOCK = SystemClock()
FEWEST_CALLS = _WARM_UP_CALLS + _FEWEST_ROUNDS
"""Minimum number of calls of each function in ``interleave``."""


class Timings(msgspec.Struct, frozen=True):
    """Latencies of one function or, if it is called with inputs of several sizes, of each size."""

    seconds: Sequence[Array]
    """The latencies of each load or, within one load, of each block, in seconds. Empty if there are several sizes."""
    busy: str = ""
    """Other processes that disturbed the measurement, as text; empty if there were none."""
    sizes: tuple[Timings, ...] = ()
    """The timings of each size, with the same loads; empty if there is only one size."""
    shares: tuple[float, ...] = ()
    """The fraction of calls that have each size."""

    def joined(self, other: Timings) -> Timings:
        """These timings together with ``other``, which were measured separately."""
        sizes = tuple(one.joined(more) for one, more in zip(self.sizes, other.sizes, strict=True))
        return Timings((*self.seconds, *other.seconds), self.busy or other.busy, sizes, self.shares)

    @property
    def calls(self) -> int:
        return sum(map(len, self.seconds)) + sum(one.calls for one in self.sizes)

    @property
    def medians(self) -> Array:
        """The median latency of each load or block, in seconds. With several sizes, the weighted mean of their medians."""
        if self.sizes:
            return np.asarray(np.average([one.medians for one in self.sizes], axis=0, weights=self.shares))
        return np.array([np.median(part) for part in self.seconds])

    @property
    def p50_ms(self) -> float:
        return float(np.median(self.medians)) * 1e3

    @property
    def p99_ms(self) -> float:
        return self.percentile_ms(99)

    def percentile_ms(self, percent: float) -> float:
        """Percentile over all calls, in milliseconds. With several sizes, each size counts by its share."""
        if not self.sizes:
            return float(np.percentile(np.concatenate(self.seconds), percent)) * 1e3
        parts = [np.concatenate(one.seconds) for one in self.sizes]
        values = np.concatenate(parts)
        weights = np.concatenate([np.full(len(p), share / len(p)) for p, share in zip(parts, self.shares, strict=True)])
        order = np.argsort(values)
        place = np.searchsorted(np.cumsum(weights[order]), percent / 100 * sum(self.shares) - 1e-9)
        return float(values[order[min(int(place), len(order) - 1)]]) * 1e3


def weighted(sizes: Sequence[Timings], shares: Sequence[float]) -> Timings:
    """The timings of calls of several sizes, or of the only size."""
    return sizes[0] if len(sizes) == 1 else Timings((), sizes[0].busy, tuple(sizes), tuple(shares))


def interleave(
    runs: Mapping[str, Turns],
    budget_s: float,
    seed: int = 0,
    clock: Clock = _SYSTEM_CLOCK,
    rest: Callable[[float], None] = time.sleep,
    enough: float = math.inf,
) -> dict[str, Timings]:
    """Time ``runs`` in turns, within about ``budget_s`` seconds and in at least two blocks each.

    A block is a pause, then calls of one run for 10 to 20 ms; the first tenth of the calls is dropped. In the pause, threads of the
    previous run stop spinning. The order is random, and every second round reverses the previous order, so that a drift affects all
    runs. Timing ends early after ``enough`` calls of each run.

    If a run has several sizes, a block calls each equally often, and never the same size twice in a row: engines reuse what they
    prepared for a size, so repeated calls would be faster than in production. The result has timings for each size, without shares.
    """
    rng = random.Random(seed)
    sizes = {name: (turns,) if callable(turns) else tuple(turns) for name, turns in runs.items()}
    order = list(runs)
    rng.shuffle(order)
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        end = clock.now() + budget_s
        typical = {name: sum(_warm_up(run, clock.now) for run in sizes[name]) for name in order}
        spare_s = max(0.0, end - clock.now())
        # A block may not be so short that it is a few cold calls, even if there is no time.
        block_s = min(_BLOCK_SECONDS, max(_SHORTEST_BLOCK_SECONDS, spare_s / (_FEWEST_ROUNDS * len(runs))))
        calls = {name: max(1, int(block_s / seconds)) for name, seconds in typical.items()}
        cold = {name: math.ceil(calls[name] / _COLD_SHARE) if typical[name] < block_s else 0 for name in runs}
        rounds = _rounds(spare_s, sum(calls[name] * typical[name] for name in runs), enough / min(calls.values()))
        found: dict[str, list[Array]] = {name: [] for name in runs}
        for number in range(rounds):
            if number >= _FEWEST_ROUNDS and number % 2 == 0 and clock.now() > end:
                break
            if number % 2:
                order.reverse()
            else:
                rng.shuffle(order)
            for name in order:
                rest(_REST_SECONDS)
                found[name].append(_block(sizes[name], cold[name], calls[name], clock.now, rng))
    finally:
        if gc_was_on:
            gc.enable()
    return {name: _by_size(blocks) for name, blocks in found.items()}


def repeat(
    time_load: Callable[[int], Mapping[str, Array]], loads: int, budget_s: float, clock: Clock = _SYSTEM_CLOCK
) -> dict[str, Timings]:
    """Time ``loads`` loads, or fewer if ``budget_s`` seconds are over, but at least three.

    ``time_load(number)`` loads everything afresh and returns the latencies by name. The number of loads depends on time but never on a
    measured latency, so that intervals stay valid.
    """
    end, found = clock.now() + budget_s, list[Mapping[str, Array]]()
    while len(found) < loads and (len(found) < FEWEST_LOADS or clock.now() < end):
        found.append(time_load(len(found)))
    return {name: Timings([one[name] for one in found]) for name in found[0]}


def speedup(base: Timings, other: Timings) -> Interval:
    """The speed of ``other`` relative to ``base``, with its 95 % interval.

    ``base`` and ``other`` must come from the same call of ``repeat`` or ``interleave``, because their loads or blocks are paired. The
    estimate is the geometric mean of the ratios of the medians. The interval is Student's t-interval of the ratios' logarithms.
    """
    ratios = np.log(base.medians) - np.log(other.medians)
    count = len(ratios)
    if count < 2:
        raise ValueError("an interval needs at least two pairs of latencies")
    value = float(ratios.mean())
    reach = student(0.975, count - 1) * float(ratios.std(ddof=1)) / math.sqrt(count)
    return Interval(*(math.exp(one) for one in (value, value - reach, value + reach)))


def feed(model: LoadedModel, inputs: Mapping[str, Array]) -> Run:
    """A callable that runs ``model.forward(inputs)``."""
    return lambda: model.forward(inputs)


def _rounds(spare_s: float, round_s: float, enough: float) -> int:
    """An even number of rounds that take about ``spare_s`` seconds, or the next one above ``enough`` if that is smaller."""
    affordable = spare_s / max(round_s, 1e-9)
    rounds = math.ceil(enough) if enough < affordable else int(affordable)
    return max(_FEWEST_ROUNDS, rounds + rounds % 2)


def _warm_up(run: Run, now: Callable[[], float]) -> float:
    """Call ``run`` until its caches are warm. Returns the shortest time of a call, in seconds."""
    shortest, calls, end = math.inf, 0, now() + _WARM_UP_SECONDS
    while calls < _WARM_UP_CALLS or now() < end:
        start = now()
        run()
        shortest, calls = min(shortest, now() - start), calls + 1
    return max(shortest, 1e-6)


def _block(sizes: Sequence[Run], cold: int, calls: int, now: Callable[[], float], rng: random.Random) -> Array:
    """The latencies of ``calls`` calls of each of ``sizes``, of shape [sizes, calls], after ``cold`` calls that are dropped."""
    order, seconds = list(range(len(sizes))), np.empty((len(sizes), cold + calls))
    if len(sizes) > 1 and not cold:
        sizes[order[-1]]()  # instead of a whole round that is dropped
    for number in range(cold + calls):
        last = order[-1]
        rng.shuffle(order)
        if order[0] == last:
            order.reverse()
        for size in order:
            start = now()
            sizes[size]()
            seconds[size, number] = now() - start
    return seconds[:, cold:]


def _by_size(blocks: Sequence[Array]) -> Timings:
    """The timings of one run from its ``blocks`` of shape [sizes, calls]."""
    sizes = tuple(Timings(rows) for rows in zip(*blocks, strict=True))
    return sizes[0] if len(sizes) == 1 else Timings((), sizes=sizes)
