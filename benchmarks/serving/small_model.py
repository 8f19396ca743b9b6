"""The cost of the request path: the 32 → 64 → 8 MLP, one row per request, compared with each installed peer. Measured with 64
connections, with 64 gRPC streams (16 per connection), and with one connection. Penstock is compared with one peer at a time, in
turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.peers.catalog import PEERS, Form, Peer, running
from benchmarks.results import Row, claim, skipped
from benchmarks.rounds import Side, grpc_side, http_side, latency_facts, measure, median, ratio, side, throughput_claim
from benchmarks.servers import Server, penstock, split_cores
from penstock.tensor import Array

_JSON_GOALS = {"fastapi": 5.0, "triton": 2.5, "mosec": 1.6, "mlserver": 15.0, "kserve": 15.0, "litserve": 15.0}
_BINARY_GOALS = {"triton": 2.5, "mosec": 1.0}
_GRPC_GOALS = {"triton": 2.5, "mlserver": 15.0, "kserve": 15.0}
_CONNECTIONS = 64


def run(quick: bool) -> list[Row]:
    """Return the rows of this part, grouped by request form."""
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((1, 32)).astype(np.float32) for _ in range(_CONNECTIONS)]
    found: list[tuple[int, Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = models.mlp(Path(folder) / "mlp.onnx")
        for peer in PEERS.values():
            found += compare(peer, model, rows, quick)
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def compare(peer: Peer, model: Path, rows: list[Array], quick: bool) -> Iterator[tuple[int, Row]]:
    """Yield each row with the number of its request form."""
    cores, _ = split_cores()
    rounds, seconds = (2, 0.5) if quick else (7, 1.0)
    inputs = [{"input": row} for row in rows]
    try:
        with penstock(model, cores) as ours, running(peer, model, cores) as theirs:
            many = {"ours": side(ours, "mlp", inputs), "theirs": _side(theirs, peer.json, rows)}
            found = measure(many, _CONNECTIONS, rounds, seconds)
            name = f"requests/s ratio to {peer.title}, JSON, 64 connections"
            yield 0, throughput_claim(name, found["ours"], found["theirs"], _JSON_GOALS.get(peer.name))
            if peer.binary:
                sides = {"ours": side(ours, "mlp", inputs, binary=True), "theirs": _side(theirs, peer.binary, rows)}
                found = measure(sides, _CONNECTIONS, rounds, seconds)
                what = "binary" if peer.name == "triton" else "ours binary, theirs raw bytes"
                name = f"requests/s ratio to {peer.title}, {what}, 64 connections"
                yield 1, throughput_claim(name, found["ours"], found["theirs"], _BINARY_GOALS.get(peer.name))
            if peer.grpc:
                sides = {"ours": grpc_side(ours, "mlp", inputs), "theirs": grpc_side(theirs, "mlp", inputs)}
                found = measure(sides, _CONNECTIONS, rounds, seconds)
                name = f"requests/s ratio to {peer.title}, gRPC, 64 streams"
                yield 2, throughput_claim(name, found["ours"], found["theirs"], _GRPC_GOALS.get(peer.name))
            if peer.name == "fastapi":
                yield from ((3, row) for row in one_connection(many, rounds, seconds))
    except RuntimeError as error:
        yield 4, skipped(f"{peer.title}", error)


def one_connection(sides: dict[str, Side], rounds: int, seconds: float) -> list[Row]:
    """The latency of a single connection, without waiting for other requests."""
    found = measure(sides, 1, rounds, seconds)
    ours, theirs = ([one.p50_ms for one in found[name]] for name in ("ours", "theirs"))
    times = ratio(theirs, ours)
    note = f"{median(found['ours'], lambda one: one.p50_ms):.3g} : {median(found['theirs'], lambda one: one.p50_ms):.3g} ms"
    first = claim("p50 ratio to FastAPI, JSON, 1 connection", times, "×", ">=", 1, note=note)
    return [first, latency_facts("1 connection to FastAPI", found["ours"], found["theirs"])[1]]


def _side(server: Server, form: Form, rows: list[Array]) -> Side:
    return http_side(server, [form.request(server.address, "mlp", row) for row in rows])
