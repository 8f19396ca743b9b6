"""The fraction of an engine's speed that remains when the engine's model is served. The model is a residual CNN on 3×64×64 images,
which takes about three milliseconds. Tensors are binary. The goodput at 64 connections is compared with a loop that calls the same
engine with its best batch. The p50 at one connection is compared with one call of the engine. Server and engine run in turn, with
one thread on the same core.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.results import Row, claim
from benchmarks.rounds import burst, difference, interleave, ratio, side
from benchmarks.scenarios.goodput import best_batch, goodput, loop
from benchmarks.servers import penstock, pinned, split_cores
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.perf.measure import Run, feed

_MAX_BATCH = 32  # half of the connections, so that one batch runs while the next batch collects requests


def run(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    cores, _ = split_cores()
    rounds, seconds = (2, 1.0) if quick else (7, 2.0)
    rng = np.random.default_rng(0)
    images = {"input": rng.standard_normal((64, 3, 64, 64)).astype(np.float32)}
    with tempfile.TemporaryDirectory() as folder, pinned(cores):
        path = models.small_cnn(Path(folder) / "cnn.onnx")
        engine = get_engine("onnxruntime").load(Artifact.from_file(path), {"threads": 1})
        _, best = best_batch(engine, images, 2.0 if quick else 5.0)
        single = feed(engine, make_dataset(images, None).call(1))
        with penstock(path, cores, "--max-batch", str(_MAX_BATCH)) as server:
            binary = side(server, "cnn", [{"input": images["input"][row : row + 1]} for row in range(64)], binary=True)
            many = interleave(
                {
                    "engine": partial(
                        loop, feed(engine, make_dataset(images, None).call(best.batch)), best.batch, seconds
                    ),
                    "server": partial(goodput, binary, seconds),
                },
                rounds,
            )
            one = interleave(
                {"engine": partial(p50_ms, single, seconds), "server": lambda: burst(binary, 1, seconds, 0.1).p50_ms},
                rounds,
            )
    note = f"{np.median(many['server']):,.0f} requests/s : {np.median(many['engine']):,.0f} rows/s, best batch {best.batch}"
    times = f"{np.median(one['server']):.3g} : {np.median(one['engine']):.3g} ms"
    return [
        claim(
            "3 ms CNN, goodput to the engine's loop", ratio(many["server"], many["engine"]), "", ">=", 0.97, note=note
        ),
        claim(
            "3 ms CNN, p50 at 1 connection above the engine's",
            difference(one["server"], one["engine"]),
            "ms",
            "<=",
            0.3,
            note=times,
        ),
    ]


def p50_ms(call: Run, seconds: float) -> float:
    """Median time of one call, in milliseconds."""
    found = []
    start = now = time.perf_counter()
    while now < start + seconds:
        before = now
        call()
        now = time.perf_counter()
        found.append(now - before)
    return float(np.median(found)) * 1e3
