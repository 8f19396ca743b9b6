"""Pipelines from pictures to labels: a stream in one process against a serial loop, and `penstock serve` against FastAPI. The network
is like ResNet-18, quantised to INT8 by ONNX Runtime. Compared programs are measured in turn, round by round.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pipelines import http, video720
from benchmarks.results import Row, skipped

PARTS: dict[str, Callable[[bool], list[Row]]] = {"video720": video720.run, "http": http.run}


def run(quick: bool) -> list[Row]:
    """Return the rows of all parts. A part that fails has one row, with the error."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows
