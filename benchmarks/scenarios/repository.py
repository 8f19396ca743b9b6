"""The model repository: what loading and unloading costs those that are served, in time and in memory; three hundred models in
one server; an ensemble, a Python model and a sequence beside the same without."""

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
    """The rows of all parts; one for each part that fails."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (PenstockError, RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows
