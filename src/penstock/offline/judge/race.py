"""Race: times models in turns, warm and with nothing else running in the process.

A child process that has loaded nothing waits for races. For every load it forks a copy of itself, which loads only the models of the
race, times them in turns, and ends. So memory, spinning threads and caches of earlier races or of this process cannot influence the
timings.
"""

from __future__ import annotations

import atexit
import contextlib
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import SizedCall
from penstock.engines.registry import get_engine
from penstock.offline.apart import Apart, forked
from penstock.offline.sessions import session
from penstock.perf.conditions import OthersWatch
from penstock.perf.measure import LOADS, Run, Timings, feed, interleave, repeat, weighted
from penstock.tensor import Array

_Name = TypeVar("_Name", bound=Hashable)

_ENOUGH_CALLS = 60
"""Calls of a model in one load. More of them hardly narrow an interval, which depends on the loads."""
_MOST_PADDING = 1 << 20

_child = Apart()
atexit.register(_child.close)


class Entrant(NamedTuple):
    """A model with the engine that runs it, and the engine's options."""

    artifact: Artifact
    engine: str
    options: Mapping[str, Any]


def race(
    models: Mapping[_Name, Artifact],
    calls: Sequence[SizedCall],
    budget_s: float,
    threads: int = 1,
    engine: str = "onnxruntime",
    loads: int = LOADS,
) -> dict[_Name, Timings]:
    """Time ``calls`` of each of ``models``; see ``race_entrants``."""
    entrants = {name: Entrant(model, engine, {"threads": threads}) for name, model in models.items()}
    return race_entrants(entrants, calls, budget_s, loads)


def race_entrants(
    entrants: Mapping[_Name, Entrant], calls: Sequence[SizedCall], budget_s: float, loads: int = LOADS
) -> dict[_Name, Timings]:
    """Time ``calls`` of each of ``entrants``. Timings are paired by load. If there are several calls, the timings of each are kept.

    The models are loaded ``loads`` times, or as often as ``budget_s`` seconds allow, but at least three times. Raises PenstockError if
    a model does not load or run.
    """
    found = _child.call(_race, list(entrants.values()), list(calls), budget_s, loads)
    return dict(zip(entrants, found, strict=True))


def _race(entrants: Sequence[Entrant], calls: Sequence[SizedCall], budget_s: float, loads: int) -> list[Timings]:
    for entrant in entrants:
        get_engine(entrant.engine)  # imports the engine, once for all copies of this process
    inputs = [call.inputs for call in calls]
    watch = OthersWatch()
    found = repeat(lambda number: forked(_time_load, entrants, inputs, budget_s / loads, number), loads, budget_s)
    busy = watch.finish()
    shares = [call.share for call in calls]
    return [
        weighted([msgspec.structs.replace(found[f"{place} {size}"], busy=busy) for size in range(len(calls))], shares)
        for place in range(len(entrants))
    ]


def _time_load(
    entrants: Sequence[Entrant], inputs: Sequence[Mapping[str, Array]], budget_s: float, number: int
) -> dict[str, Array]:
    """The latencies of ``entrants`` in one load, by their places and the places of the ``inputs``.

    The order of loading is random, and in every second load the reverse of that in the load before. Random padding moves the models
    to other addresses in each load (C. Curtsinger, E. Berger, "Stabilizer", ASPLOS 2013).
    """
    rng = random.Random(number // 2)
    places = list(range(len(entrants)))
    rng.shuffle(places)
    if number % 2:
        places.reverse()
    with contextlib.ExitStack() as stack:
        running, padding = dict[str, list[Run]](), []
        for place in places:
            padding.append(bytes(random.Random(f"{number} {place}").randrange(_MOST_PADDING)))
            model = stack.enter_context(session(*entrants[place]))
            running[str(place)] = [feed(model, given) for given in inputs]
        timed = interleave(running, budget_s, seed=number, enough=_ENOUGH_CALLS)
    return {
        f"{place} {size}": np.concatenate(one.seconds)
        for place, timings in timed.items()
        for size, one in enumerate(timings.sizes or (timings,))
    }
