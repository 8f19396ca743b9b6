"""The cost of idle connections, which stay open after one request. Measures the memory per idle connection (the increase of the
resident set divided by the number of connections), and the latency of active connections (the MLP, JSON, 8 connections), without
and with idle connections in turn.
"""

from __future__ import annotations

import resource
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import Round, Side, burst, median, ratio, side
from benchmarks.servers import Server, penstock, split_cores

_IDLE = 10_000
_SPARE = 1_000  # descriptors that are reserved for everything else
_ACTIVE = 8
_PATIENCE_S = 30


def run(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    rounds, seconds = (2, 0.5) if quick else (7, 2.0)
    count = min(_IDLE, allow_descriptors(_IDLE + _SPARE) - _SPARE)
    rng = np.random.default_rng(0)
    inputs = [{"input": rng.standard_normal((1, 32)).astype(np.float32)} for _ in range(64)]
    cores, _ = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        model = models.mlp(Path(folder) / "mlp.onnx")
        with penstock(model, cores, max_connections=count + _SPARE, idle_timeout_s=3600) as server:
            active = side(server, "mlp", inputs)
            burst(active, _ACTIVE, 1.0)  # let the server allocate the memory that it needs for normal work
            each, without, crowded = measure(server, active, count, rounds, seconds)
    name = f"{count:,} idle connections"
    times = ratio([one.p50_ms for one in crowded], [one.p50_ms for one in without])
    tails = ratio([one.p99_ms for one in crowded], [one.p99_ms for one in without])
    notes = [f"{median(crowded, pick):.3g} : {median(without, pick):.3g} ms" for pick in (_p50, _p99)]
    return [
        claim(f"{name}, memory each", each / 1024, "KiB", "<=", 20),
        claim(f"{name}, p50 of {_ACTIVE} active ones to that without", times, "×", "<=", 1.1, note=notes[0]),
        fact(f"{name}, p99 of {_ACTIVE} active ones to that without", tails.value, "×", interval=tails, note=notes[1]),
    ]


def measure(
    server: Server, active: Side, count: int, rounds: int, seconds: float
) -> tuple[float, list[Round], list[Round]]:
    """The bytes per idle connection, measured when these connections are first opened, and the rounds of the active connections
    without and with idle connections.
    """
    without: list[Round] = []
    crowded: list[Round] = []
    each = 0.0
    for _ in range(rounds):
        without.append(burst(active, _ACTIVE, seconds))
        before = server.rss_bytes()
        with idle(server, count):
            each = each or (server.rss_bytes() - before) / count
            crowded.append(burst(active, _ACTIVE, seconds))
    return each, without, crowded


def allow_descriptors(wanted: int) -> int:
    """Raise the limit on open files for this process and its children to ``wanted`` if this is allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return max(soft, limit)


@contextmanager
def idle(server: Server, count: int) -> Iterator[None]:
    """Open ``count`` connections. Each has received an answer and then stays idle."""
    request = f"GET /v2/health/live HTTP/1.1\r\nHost: {server.address.authority}\r\n\r\n".encode()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.create_connection((server.address.host, server.address.port), _PATIENCE_S)
            # Close by reset, because ports in TIME_WAIT would soon be used up.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sockets.append(one)
            one.sendall(request)
            if not one.recv(4096).startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"connection {len(sockets)} to {server.address.url} was refused")
        yield
    finally:
        for one in sockets:
            one.close()


def _p50(one: Round) -> float:
    return one.p50_ms


def _p99(one: Round) -> float:
    return one.p99_ms
