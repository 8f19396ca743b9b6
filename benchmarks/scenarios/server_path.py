"""The server without the cost of a model: a 32 → 64 → 8 MLP that takes almost no time, one row per request. Both servers run on
the same core, and the load on another. FastAPI with uvicorn and ONNX Runtime supports only JSON. Ratios above 1 are in favour of
Penstock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.results import Row, fact
from benchmarks.rounds import Round, latency_facts, measure, median, ratio, side, throughput_claim
from benchmarks.servers import fastapi, penstock, split_cores


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    cores, _ = split_cores()
    rounds, seconds = (4, 1.0) if quick else (11, 2.0)
    rng = np.random.default_rng(0)
    inputs = [{"input": rng.standard_normal((1, 32)).astype(np.float32)} for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        model = models.mlp(Path(folder) / "mlp.onnx")
        with penstock(model, cores) as ours, fastapi(model, cores) as theirs:
            sides = {
                "ours": side(ours, "mlp", inputs),
                "binary": side(ours, "mlp", inputs, binary=True),
                "theirs": side(theirs, "mlp", inputs),
            }
            many = measure(sides, 64, rounds, seconds)
            one = measure(sides, 1, rounds, seconds)
    return [
        throughput_claim("requests/s ratio at 64 connections, JSON", many["ours"], many["theirs"], 4),
        *_facts(many),
        *latency_facts("64 connections, JSON", many["ours"], many["theirs"]),
        *latency_facts("1 connection, JSON", one["ours"], one["theirs"]),
        *latency_facts("1 connection, our binary to their JSON", one["binary"], one["theirs"]),
    ]


def _facts(many: Mapping[str, list[Round]]) -> list[Row]:
    found = ratio([one.throughput for one in many["binary"]], [one.throughput for one in many["theirs"]])
    throughput = median(many["binary"], lambda one: one.throughput)
    rows = [
        fact(
            "requests/s ratio at 64 connections, our binary to their JSON",
            found.value,
            "×",
            interval=found,
            note=f"{throughput:,.0f} requests/s",
        )
    ]
    for name, where in (("ours", "JSON"), ("binary", "binary"), ("theirs", "FastAPI")):
        value = median(many[name], lambda one: one.per_cpu_second)
        rows.append(fact(f"requests per CPU second of the server, {where}", value, "1/s"))
    return rows
