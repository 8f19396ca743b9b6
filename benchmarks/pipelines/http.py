"""A JPEG in, labels out: `penstock serve` against FastAPI, and against BentoML if it is installed. Both use Pillow and ONNX Runtime.
Each server is measured with 16 connections and with one.

All servers run on the same core with one thread, get the same pictures, and send the same JSON members. FastAPI and BentoML run the
model as exported, in FP32. Penstock serves the pipeline over the bundle that `penstock build` makes of it (``pictures.built``), so the
ratio includes what the build gains by its choice of engine and precision. The ratios for the same model show what the server alone
gains: of the same FP32 model, and of the INT8 model of ONNX Runtime's quantiser. Both sides then run it in ONNX Runtime.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.catalog import PEERS, running
from benchmarks.pipelines.pictures import build_row, built, jpegs, network, pack, quantised
from benchmarks.results import Row, claim, fact, skipped
from benchmarks.rounds import Round, Side, http_side, latency_facts, measure, median, ratio, throughput_claim
from benchmarks.servers import Server, penstock, serving, split_cores

_CONNECTIONS, _GOAL = 16, 2.5
_SIZE = 320, 240
_PAIRS = {
    ("built", "FastAPI FP32"): _GOAL,
    ("built", "BentoML FP32"): _GOAL,
    ("FP32", "FastAPI FP32"): None,
    ("INT8", "FastAPI INT8"): None,
}
"""The goals of our side against their side."""


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    cores, _ = split_cores()
    rounds, seconds = (2, 1.0) if quick else (4, 2.5)
    pictures = jpegs(8, *_SIZE)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        original = network(folder)
        made = built(original, *((4, 5.0) if quick else (16, 20.0)))
        models = {"FP32": original, "INT8": quantised(original), "built": made.bundle}
        sides: dict[str, Side] = {}
        for title, model in models.items():
            server = stack.enter_context(penstock(pack(folder, model), cores))
            sides[title] = _side(server, "/v2/models/classify/run", pictures)
        for title in ("FP32", "INT8"):
            arguments = ["-m", "benchmarks.pipelines.fastapi_app", str(models[title])]
            sides[f"FastAPI {title}"] = _side(stack.enter_context(serving(arguments, cores)), "/classify", pictures)
        try:
            server = stack.enter_context(running(PEERS["bentoml"], original, cores, "benchmarks.pipelines.bentoml_app"))
            sides["BentoML FP32"] = _side(server, "/classify", pictures)
        except RuntimeError as error:
            rows.append(skipped("BentoML FP32", error))
        many = measure(sides, _CONNECTIONS, rounds, seconds)
        single = measure(sides, 1, rounds, seconds)
    return [*rows, *_rows(many, single), build_row(made)]


def _rows(many: Mapping[str, Sequence[Round]], single: Mapping[str, Sequence[Round]]) -> list[Row]:
    rows = []
    for (ours, theirs), goal in _PAIRS.items():
        if theirs not in many:
            continue
        pair = f"{ours} : {theirs}"
        name = f"{pair}: requests/s, {_CONNECTIONS} connections"
        rows.append(throughput_claim(name, many[ours], many[theirs], goal))
        latency = ratio([one.p50_ms for one in single[ours]], [one.p50_ms for one in single[theirs]])
        name = f"{pair}: p50, one connection"
        rows.append(claim(name, latency, "×", "<=", 1.0) if goal else fact(name, latency.value, "×", interval=latency))
        work = ratio([one.per_cpu_second for one in many[ours]], [one.per_cpu_second for one in many[theirs]])
        rows.append(fact(f"{pair}: requests per CPU second", work.value, "×", interval=work))
        rows += [] if goal is None else latency_facts(f"one connection, {pair}", single[ours], single[theirs])
    cost = {name: median(found, lambda one: 1e3 / one.per_cpu_second) for name, found in many.items()}
    return rows + [fact(f"CPU time of a request: {name}", value, "ms") for name, value in cost.items()]


def _side(server: Server, path: str, pictures: list[bytes]) -> Side:
    head = f"POST {path} HTTP/1.1\r\nHost: {server.address.host}\r\nContent-Type: image/jpeg\r\n"
    return http_side(server, [f"{head}Content-Length: {len(one)}\r\n\r\n".encode() + one for one in pictures])
