"""Pipelines from pictures to labels: a stream in one process against a serial loop, and `penstock serve` against FastAPI, with a
network like ResNet-18; the standard steps against their reference libraries; equal answers in a process, a server and a video; the
time of an embedded call beyond the engine's; and offloading over simulated links. Compared programs are measured in turn.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import offloading
from benchmarks.pipelines import embedded, http, same, standard_steps, video720
from benchmarks.results import Row, skipped
from penstock.errors import PenstockError

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "video720": video720.run,
    "http": http.run,
    "steps": standard_steps.run,
    "same": same.run,
    "embedded": embedded.run,
    "offload": offloading.rows,
}


def run(quick: bool) -> list[Row]:
    """Return the rows of all parts. A part that fails has one row, with the error."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (PenstockError, RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows
