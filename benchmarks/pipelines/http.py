"""A JPEG in, labels out: `penstock serve` against FastAPI with Pillow and ONNX Runtime, with 16 connections and with one.

All servers run on the same core with one thread, get the same pictures, and send the same JSON members. FastAPI runs the model as
exported, in FP32. Penstock serves this model in INT8, as its own quantiser writes it. For comparison, both also serve the same FP32
model, and the same INT8 model of ONNX Runtime's quantiser.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.pipelines.pictures import compressed, jpegs, network, pack, quantised
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import Round, Side, http_side, latency_facts, measure, median, ratio, throughput_claim
from benchmarks.servers import Server, penstock, serving, split_cores

_CONNECTIONS, _GOAL = 16, 2.5
_SIZE = 320, 240
_PAIRS = {
    "compressed by Penstock : as exported": ("compressed", "FastAPI FP32", _GOAL),
    "same model in FP32": ("FP32", "FastAPI FP32", None),
    "same model in INT8 by ONNX Runtime's quantiser": ("INT8", "FastAPI INT8", None),
}
"""Title, our side, their side and goal."""


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    cores, _ = split_cores()
    rounds, seconds = (2, 1.0) if quick else (4, 2.5)
    pictures = jpegs(8, *_SIZE)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        original = network(folder)
        models = {"FP32": original, "INT8": quantised(original), "compressed": compressed(original)}
        sides: dict[str, Side] = {}
        for title, model in models.items():
            server = stack.enter_context(penstock(pack(folder, model), cores))
            sides[title] = _side(server, "/v2/models/classify/run", pictures)
        for title in ("FP32", "INT8"):
            arguments = ["-m", "benchmarks.pipelines.fastapi_app", str(models[title])]
            sides[f"FastAPI {title}"] = _side(stack.enter_context(serving(arguments, cores)), "/classify", pictures)
        many = measure(sides, _CONNECTIONS, rounds, seconds)
        single = measure(sides, 1, rounds, seconds)
    return _rows(many, single)


def _rows(many: Mapping[str, Sequence[Round]], single: Mapping[str, Sequence[Round]]) -> list[Row]:
    rows = []
    for title, (ours, theirs, goal) in _PAIRS.items():
        name = f"{title}: requests/s ratio to FastAPI and Pillow, {_CONNECTIONS} connections"
        rows.append(throughput_claim(name, many[ours], many[theirs], goal))
        latency = ratio([one.p50_ms for one in single[ours]], [one.p50_ms for one in single[theirs]])
        rows.append(
            claim(f"{title}: p50 ratio to FastAPI and Pillow, one connection", latency, "×", "<=", 1.0)
            if goal
            else fact(f"{title}: p50 ratio, one connection", latency.value, "×", interval=latency)
        )
        rows += [] if goal is None else latency_facts(f"one connection, {title}", single[ours], single[theirs])
    work = {name: median(found, lambda one: one.per_cpu_second) for name, found in many.items()}
    return rows + [fact(f"requests per CPU second: {name}", value, "1/s") for name, value in work.items()]


def _side(server: Server, path: str, pictures: list[bytes]) -> Side:
    head = f"POST {path} HTTP/1.1\r\nHost: {server.address.host}\r\nContent-Type: image/jpeg\r\n"
    return http_side(server, [f"{head}Content-Length: {len(one)}\r\n\r\n".encode() + one for one in pictures])
