"""A JPEG in, labels out: `penstock serve` against FastAPI with Pillow and ONNX Runtime, with 16 connections and with one. Both servers
run on the same core, and both send the same JSON members.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.pipelines.pictures import jpegs, pack
from benchmarks.results import Row, claim
from benchmarks.rounds import Side, http_side, latency_facts, measure, ratio, throughput_claim
from benchmarks.servers import Server, penstock, serving, split_cores

_CONNECTIONS, _GOAL = 16, 2.5
_SIZE = 320, 240


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    cores, _ = split_cores()
    rounds, seconds = (2, 1.0) if quick else (7, 3.0)
    pictures = jpegs(8, *_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        bundle, model = pack(Path(folder))
        theirs = serving(["-m", "benchmarks.pipelines.fastapi_app", str(model)], cores)
        with penstock(bundle, cores) as one, theirs as other:
            sides = {
                "ours": _side(one, "/v2/models/classify/run", pictures),
                "theirs": _side(other, "/classify", pictures),
            }
            many = measure(sides, _CONNECTIONS, rounds, seconds)
            single = measure(sides, 1, rounds, seconds)
    latency = ratio([one.p50_ms for one in single["ours"]], [one.p50_ms for one in single["theirs"]])
    name = f"requests/s ratio to FastAPI and Pillow, {_CONNECTIONS} connections"
    return [
        throughput_claim(name, many["ours"], many["theirs"], _GOAL),
        claim("p50 ratio to FastAPI and Pillow, one connection", latency, "×", "<=", 1.0),
        *latency_facts("one connection", single["ours"], single["theirs"]),
    ]


def _side(server: Server, path: str, pictures: list[bytes]) -> Side:
    head = f"POST {path} HTTP/1.1\r\nHost: {server.address.host}\r\nContent-Type: image/jpeg\r\n"
    return http_side(server, [f"{head}Content-Length: {len(one)}\r\n\r\n".encode() + one for one in pictures])
