"""What telemetry costs the hot path: a whole HTTP request (the MLP of 32 → 64 → 8, JSON and binary, 64 connections) through parser,
data plane, scheduler, ONNX Runtime and encoder in one process without sockets, which would hide it; statistics and metrics as
shipped against the same server whose statistics do nothing. Bursts in turn, by CPU time of both threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import in_process, models
from benchmarks.in_process import InProcess
from benchmarks.results import Row, claim
from benchmarks.rounds import ratio
from benchmarks.servers import pinned, split_cores
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.perf.http_client import Address
from penstock.perf.oip_client import infer_request
from penstock.telemetry.batch_log import BatchLog

_CONNECTIONS = 64


class NoLog(BatchLog):
    """Tells the statistics nothing."""

    __slots__ = ()

    def executed(self, *_: Any) -> None:
        """Forget it."""


def run(quick: bool) -> list[Row]:
    """The rows of this scenario."""
    rounds, requests = (200, 640) if quick else (1_500, 640)
    generator = np.random.default_rng(0)
    inputs = [{"input": generator.standard_normal((1, 32)).astype(np.float32)} for _ in range(_CONNECTIONS)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, pinned(split_cores()[0]):
        path = models.mlp(Path(folder) / "mlp.onnx")
        for name, binary in (("JSON", False), ("binary", True)):
            engine = get_engine("onnxruntime").load(Artifact.from_file(path), {"threads": 1})
            # Whether the loop runs a batch of 64 itself would be chance, and cost more than what is measured.
            engine.predictable = False  # type: ignore[attr-defined]
            address = Address("localhost", 8000)
            whole = [infer_request(address, "m", one, binary=binary) for one in inputs]
            cost, note = in_process.run(measure(engine, whole, rounds, requests))
            rows.append(claim(f"CPU time that telemetry adds, {name}", cost, "%", "<=", 3, note=note))
    return rows


async def measure(engine: LoadedModel, whole: Sequence[bytes], rounds: int, requests: int) -> tuple[Interval, str]:
    """Per cent more CPU time with telemetry than without, and a note with both times."""
    servers = {"with": InProcess(engine), "without": InProcess(engine, NoLog)}
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 2):
        for name in servers if number % 2 else reversed(servers):
            start = time.process_time()
            await servers[name].http(requests, _CONNECTIONS, whole)
            seconds[name].append((time.process_time() - start) / requests)
    counted = servers["with"].statistics.to_dict()["inference_stats"]["success"]["count"]
    if counted != requests * (rounds + 2):
        raise RuntimeError(f"the statistics counted {counted} requests")
    for server in servers.values():
        await server.close()
    found = {name: values[2:] for name, values in seconds.items()}
    times = ratio(found["with"], found["without"])
    cost = Interval(*(100 * (value - 1) for value in (times.value, times.low, times.high)))
    return cost, " : ".join(f"{1e6 * float(np.median(values)):.2f}" for values in found.values()) + " µs a request"
