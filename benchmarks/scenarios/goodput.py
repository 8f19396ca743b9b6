"""The cost of serving a model that takes a few milliseconds (a residual CNN on 3×64×64 images). Compares the requests/s of
`penstock serve` at 64 connections with the rows/s of a loop that only calls the same engine with its best batch. Both use one
thread on the same core, in turn. Images are sent as binary tensors, as recommended for large tensors. JSON is measured for
comparison.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import Side, burst, interleave, ratio, side
from benchmarks.servers import penstock, pinned, split_cores
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.measurement import LatencyPoint
from penstock.perf.measure import feed
from penstock.perf.profile import profile, rows_per_second
from penstock.tensor import Array

_CONNECTIONS = 64
_MAX_BATCH = 32  # half of the connections, so that one batch runs while the next batch collects requests


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    cores, _ = split_cores()
    rounds, seconds = (4, 2.0) if quick else (11, 3.0)
    rng = np.random.default_rng(0)
    images = {"input": rng.standard_normal((64, 3, 64, 64)).astype(np.float32)}
    requests = [{"input": images["input"][row : row + 1]} for row in range(64)]
    with tempfile.TemporaryDirectory() as folder, pinned(cores):
        path = models.small_cnn(Path(folder) / "cnn.onnx")
        engine = get_engine("onnxruntime").load(Artifact.from_file(path), {"threads": 1})
        single, best = best_batch(engine, images, 2.0 if quick else 10.0)
        with penstock(path, cores, "--max-batch", str(_MAX_BATCH)) as server:
            binary, text = (side(server, "cnn", requests, binary=binary) for binary in (True, False))
            runs: dict[str, Callable[[], float]] = {
                "engine": partial(loop, feed(engine, make_dataset(images, None).call(best.batch)), best.batch, seconds),
                "binary": partial(goodput, binary, seconds),
                "json": partial(goodput, text, seconds),
            }
            found = interleave(runs, rounds)
    in_json = ratio(found["json"], found["engine"])
    note = f"{np.median(found['binary']):,.0f} requests/s : {np.median(found['engine']):,.0f} rows/s"
    return [
        claim("goodput at 64 connections, binary", ratio(found["binary"], found["engine"]), "", ">=", 0.95, note=note),
        fact("goodput at 64 connections, JSON", in_json.value, "", interval=in_json, note="12,288 numbers as text"),
        fact(
            "one call of the engine, one row",
            single.p50_ms,
            "ms",
            note=f"its best batch is {best.batch}; the server's largest is {_MAX_BATCH}",
        ),
    ]


def best_batch(model: LoadedModel, images: dict[str, Array], budget_s: float) -> tuple[LatencyPoint, LatencyPoint]:
    """The latency of a single row, and the latency of the batch with the highest throughput."""
    points = profile({"cnn": model}, make_dataset(images, None).call, budget_s)["cnn"]
    return points[0], max(points, key=rows_per_second)


def goodput(side: Side, seconds: float) -> float:
    """Requests answered per second after a warm-up. Without a warm-up, the first batch of a burst would have too much weight."""
    return burst(side, _CONNECTIONS, seconds, warmup_s=0.3).throughput


def loop(call: Callable[[], object], rows: int, seconds: float) -> float:
    """Rows per second of a loop that only makes calls."""
    calls = 0
    start = now = time.perf_counter()
    while now < start + seconds:
        call()
        calls += 1
        now = time.perf_counter()
    return calls * rows / (now - start)
