"""The model repository: the cost of loading and unloading for other models, in latency and in memory; three hundred models in one
server; and the cost of ensembles, Python models and sequences.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.repository.beside import beside
from benchmarks.repository.many import many
from benchmarks.repository.memory import memory
from benchmarks.repository.reload import reload
from benchmarks.results import Row, skipped
from penstock.errors import PenstockError

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "reload": reload,
    "memory": memory,
    "many": many,
    "beside": beside,
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
