"""The cost of telemetry on the hot path. HTTP requests (the 32 → 64 → 8 MLP, JSON and binary, 64 connections) pass through parser,
data plane, scheduler, ONNX Runtime and encoder in one process. There are no sockets, because their cost would hide the cost of
telemetry. The server with its usual statistics and metrics is compared with the same server whose statistics do nothing. Bursts
alternate, and the CPU time of both threads is measured.
"""

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
    """A batch log that records nothing."""

    __slots__ = ()

    def executed(self, *_: Any) -> None:
        """Do nothing."""


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    rounds, requests = (200, 640) if quick else (1_500, 640)
    generator = np.random.default_rng(0)
    inputs = [{"input": generator.standard_normal((1, 32)).astype(np.float32)} for _ in range(_CONNECTIONS)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, pinned(split_cores()[0]):
        path = models.mlp(Path(folder) / "mlp.onnx")
        for name, binary in (("JSON", False), ("binary", True)):
            engine = get_engine("onnxruntime").load(Artifact.from_file(path), {"threads": 1})
            # Prevents that the event loop runs some batches itself. This would happen at random, and its effect would be larger
            # than the measured cost.
            engine.predictable = False  # type: ignore[attr-defined]
            address = Address("localhost", 8000)
            whole = [infer_request(address, "m", one, binary=binary) for one in inputs]
            cost, note = in_process.run(measure(engine, whole, rounds, requests))
            rows.append(claim(f"CPU time that telemetry adds, {name}", cost, "%", "<=", 3, note=note))
    return rows


async def measure(engine: LoadedModel, whole: Sequence[bytes], rounds: int, requests: int) -> tuple[Interval, str]:
    """The additional CPU time with telemetry, in per cent, and a note with both times."""
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
