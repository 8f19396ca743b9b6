"""A first look at the speed of INT8, before time is spent on its accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.artifact import Artifact
from penstock.dataset import SizedCall
from penstock.errors import PenstockError
from penstock.measurement import Interval
from penstock.offline.compress.versions.layouts import Look
from penstock.offline.judge.race import Entrant, race_entrants
from penstock.offline.tune.space import engine_options
from penstock.perf.measure import FEWEST_LOADS, speedup


def make_look(engines: Sequence[str], calls: Sequence[SizedCall], threads: int, budget_s: float) -> Look:
    """A function that times two models in turns in each engine, with ``calls`` and ``threads`` threads. A pair takes about
    ``budget_s`` seconds, but at least three loads. Engines that cannot run the models are left out.
    """

    def look(one: Artifact, other: Artifact, only: tuple[str, ...]) -> dict[str, Interval]:
        found = {}
        for engine in only or engines:
            if engine not in engines:
                continue
            options = engine_options(engine, threads)
            entrants = {name: Entrant(model, engine, options) for name, model in (("one", one), ("other", other))}
            try:
                timings = race_entrants(entrants, calls, budget_s, FEWEST_LOADS)
            except PenstockError:
                continue  # the tuner reports the cause
            found[engine] = speedup(timings["one"], timings["other"])
        return found

    return look
