"""Overload: twice as many requests as the server can answer. The model is the CNN that takes about three milliseconds. An open
loop sends the requests as a Poisson process, and latency counts from the time at which a request was due. Each request has a
deadline of 50 ms (the parameter ``timeout``). The goodput is compared with the peak, which the same server reaches with 64
connections in a closed loop without deadlines. Both run in turn. Batches have up to 8 rows, so that two batches fit into a
deadline.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import models
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import Side, burst, ratio, side
from benchmarks.servers import Server, penstock, pinned, split_cores
from penstock.measurement import Interval
from penstock.perf import load
from penstock.perf.loops import LoadWindow
from penstock.perf.oip_client import infer_request
from penstock.tensor import Array

_CONNECTIONS = 64
_MAX_BATCH = 8
_DEADLINE_MS = 50.0
_OVERLOAD = 2.0
_REFUSALS = {"HTTP 503", "HTTP 504"}


class Overloaded(msgspec.Struct, frozen=True):
    """The result of one burst above the server's capacity."""

    goodput: float
    p99_ms: float
    offered: float
    refused: float
    """Fraction of the requests that were refused."""


def run(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    rounds, seconds = (2, 1.5) if quick else (7, 3.0)
    images = [row[None] for row in np.random.default_rng(0).standard_normal((64, 3, 64, 64)).astype(np.float32)]
    cores, _ = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        path = models.small_cnn(Path(folder) / "cnn.onnx")
        with penstock(path, cores, "--max-batch", str(_MAX_BATCH)) as server:
            calm = side(server, "cnn", [{"input": one} for one in images], binary=True)
            hurried = hurry(server, images)
            rate = _OVERLOAD * burst(calm, _CONNECTIONS, seconds, 0.3).throughput
            peaks, found = measure(server, calm, hurried, rate, rounds, seconds)
    p99 = [one.p99_ms for one in found]
    refused = float(np.median([one.refused for one in found]))
    offered = float(np.median([one.offered for one in found]))
    note = f"{np.median([one.goodput for one in found]):,.0f} : {np.median(peaks):,.0f} answers/s, {offered:,.0f} requests/s offered"
    return [
        claim(
            "overload at 2×, goodput to the peak",
            ratio([one.goodput for one in found], peaks),
            "",
            ">=",
            0.9,
            note=note,
        ),
        claim(
            "overload at 2×, p99 of the answered",
            Interval(float(np.median(p99)), min(p99), max(p99)),
            "ms",
            "<=",
            _DEADLINE_MS,
            note=f"smallest and largest of {len(p99)} rounds",
        ),
        fact("overload at 2×, refused", 100 * refused, "%"),
    ]


def measure(
    server: Server, calm: Side, hurried: list[bytes], rate: float, rounds: int, seconds: float
) -> tuple[list[float], list[Overloaded]]:
    """Measure peak and overload in turn. The first round is dropped."""
    peaks: list[float] = []
    found: list[Overloaded] = []
    for _ in range(rounds + 1):
        peaks.append(burst(calm, _CONNECTIONS, seconds, 0.3).throughput)
        found.append(overload(server, hurried, rate, seconds))
    return peaks[1:], found[1:]


def hurry(server: Server, images: list[Array]) -> list[bytes]:
    """The requests, each with its deadline."""
    timeout = {"timeout": int(_DEADLINE_MS * 1000)}
    return [infer_request(server.address, "cnn", {"input": one}, binary=True, parameters=timeout) for one in images]


def overload(server: Server, requests: list[bytes], rate: float, seconds: float) -> Overloaded:
    """Send one burst of ``rate`` requests per second. Raises RuntimeError if a request fails for another reason than a refusal."""
    with pinned(split_cores()[1]):
        found = load.run(load.open_loop(server.address, requests, rate, LoadWindow(seconds, 0.5), max_connections=1024))
    if set(found.errors_by_kind) - _REFUSALS:
        raise RuntimeError(f"requests failed under overload: {found.errors_by_kind} {found.first_errors}")
    return Overloaded(found.throughput, found.p99_ms, found.offered_rate, found.errors / max(1, found.requests))
