"""Race: times candidates with interleaved calls, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import TypeVar

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.offline.sessions import loaded
from penstock.perf.measure import Timings, feed, interleave
from penstock.tensor import Array

_Name = TypeVar("_Name", bound=Hashable)


def race(
    models: Mapping[_Name, Artifact],
    inputs: Mapping[str, Array],
    budget_s: float,
    threads: int = 1,
    engine: str = "onnxruntime",
) -> dict[_Name, Timings]:
    """Load ``models`` and time a call of each with ``inputs``, for about ``budget_s`` seconds, not counting the time to load."""
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(loaded(model, threads, engine=engine)) for name, model in models.items()}
        return race_loaded(running, inputs, budget_s)


def race_loaded(
    models: Mapping[_Name, LoadedModel], inputs: Mapping[str, Array], budget_s: float, precision: float = 0.0
) -> dict[_Name, Timings]:
    """Time ``models`` on a call with ``inputs`` for about ``budget_s`` seconds. The timings are paired by round.

    With ``precision``, the race ends when all speeds relative to the first model are known to that fraction; see ``interleave``.
    """
    runs = {str(number): feed(model, inputs) for number, model in enumerate(models.values())}
    timings = interleave(runs, budget_s, precision=precision)
    return {name: timings[str(number)] for number, name in enumerate(models)}
