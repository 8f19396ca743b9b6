"""The server without a transport and without the cost of a model: ``DataPlane.infer`` with a model that returns its input, and
with event loop and instance on one core. CPU time is measured, so that other work on the machine does not count. There are 64
requests at a time, and then one at a time.
"""

from __future__ import annotations

import statistics
import time

from benchmarks import in_process
from benchmarks.in_process import InProcess, NullModel
from benchmarks.results import Row, claim, fact
from benchmarks.servers import pinned, split_cores
from penstock.measurement import Interval


def run(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    rounds, requests = (3, 10_000) if quick else (15, 50_000)
    with pinned(split_cores()[0]):
        many, one = in_process.run(measure(rounds, requests))
    middle = Interval(statistics.median(many), min(many), max(many))
    return [
        claim(
            "null model through DataPlane.infer, requests per CPU second", middle, "1/s", ">=", 100_000,
            note=f"64 at a time; smallest and largest of {rounds} rounds",
        ),
        fact("null model through DataPlane.infer, one at a time, per CPU second", statistics.median(one), "1/s"),
    ]  # fmt: skip


async def measure(rounds: int, requests: int) -> tuple[list[float], list[float]]:
    """Requests per CPU second of each round, with 64 requests at a time and with one."""
    server = InProcess(NullModel())
    many, one = [], []
    for _ in range(rounds + 1):
        start = time.process_time()
        await server.infer(requests, 64)
        many.append(requests / (time.process_time() - start))
        start = time.process_time()
        await server.infer(requests // 10, 1)
        one.append(requests / 10 / (time.process_time() - start))
    await server.close()
    return many[1:], one[1:]
