"""The server compared with its peers. Each peer has its own environment (`make peers`) and runs the same model in ONNX Runtime
with one thread. Peers that are not installed are skipped. Every server runs with all its processes on the same core, and the load
on another. Compared servers are measured in turn, round by round. Ratios above 1 are in favour of Penstock.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results import Row, skipped
from benchmarks.serving import (
    compute_bound,
    grpc_transport,
    idle_connections,
    large_tensors,
    null_model,
    overload,
    small_model,
)

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "small_model": small_model.run,
    "large_tensors": large_tensors.run,
    "compute_bound": compute_bound.run,
    "idle_connections": idle_connections.run,
    "overload": overload.run,
    "null_model": null_model.run,
    "grpc_transport": grpc_transport.run,
}


def run(quick: bool) -> list[Row]:
    """Return the rows of all parts. A part that fails has one row, with the error."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows
