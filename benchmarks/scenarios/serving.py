"""The server against its peers, each in its own environment (`make peers`), with the same model in ONNX Runtime, one thread; a peer
that is not installed is left out. Every server, with all its processes, on the same one core, the load on another; what is
compared runs in turn, round by round. Ratios above 1 are in favour of Penstock."""

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
    """The rows of all parts; one for each part that fails."""
    rows: list[Row] = []
    for name, part in PARTS.items():
        try:
            rows += part(quick)
        except (RuntimeError, OSError) as error:
            rows.append(skipped(name, error))
    return rows
