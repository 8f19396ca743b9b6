"""The transport of tensors: an identity model with 1 MiB of FP32 as input and output, and 4 connections or streams. Binary HTTP,
gRPC and shared memory, for which only positions are sent, are compared with the same three ways in Triton and with raw bytes in
FastAPI. With both servers, the shared-memory regions are filled only once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.peers.catalog import PEERS, running
from benchmarks.requests import Region, shared_region
from benchmarks.results import Row, skipped
from benchmarks.rounds import Round, Side, burst, grpc_side, http_side, measure, side, throughput_claim
from benchmarks.servers import Server, penstock, split_cores
from penstock.tensor import Array

_NUMBERS = 262_144  # 1 MiB of FP32
_CONNECTIONS = 4
_SLOTS = 8
_MODEL = "identity"
_PATIENCE_S = 10.0


def run(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    row = np.random.default_rng(0).standard_normal((1, _NUMBERS)).astype(np.float32)
    rounds, seconds = (2, 0.5) if quick else (7, 1.0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, shared_region(row, _SLOTS) as region:
        model = models.identity(Path(folder) / f"{_MODEL}.onnx", _NUMBERS)
        cores, _ = split_cores()
        with penstock(model, cores) as ours:
            mine = sides(ours, row, region)
            for name in ("triton", "fastapi"):
                try:
                    with running(PEERS[name], model, cores) as theirs:
                        rows += _against[name](mine, theirs, row, region, rounds, seconds)
                except RuntimeError as error:
                    rows.append(skipped(PEERS[name].title, error))
            found = measure({name: mine[name] for name in ("shared memory", "binary")}, _CONNECTIONS, rounds, seconds)
        rows.append(_claim("shared memory to binary", found, "shared memory", "binary", 5))
    return rows


def sides(server: Server, row: Array, region: Region) -> dict[str, Side]:
    """The three ways in which a server of the protocol receives a tensor. Raises RuntimeError if an answer in shared memory is
    wrong.
    """
    inputs = [{"input": row}]
    shared = http_side(server, region.requests(server, _MODEL))
    region.clear()
    end = time.monotonic() + _PATIENCE_S
    while not region.answered and time.monotonic() < end:
        burst(shared, 1, 0.2)
    if not region.answered:
        raise RuntimeError(f"{server.address.url} did not write its answers to shared memory")
    return {
        "binary": side(server, _MODEL, inputs, binary=True),
        "gRPC": grpc_side(server, _MODEL, inputs),
        "shared memory": shared,
    }


def against_triton(
    ours: Mapping[str, Side], triton: Server, row: Array, region: Region, rounds: int, seconds: float
) -> list[Row]:
    """Compare each way with the same way of Triton."""
    theirs = sides(triton, row, region)
    rows = []
    for name in ours:
        found = measure({"ours": ours[name], "theirs": theirs[name]}, _CONNECTIONS, rounds, seconds)
        rows.append(_claim(f"ratio to Triton, {name}", found, "ours", "theirs", 1.5))
    return rows


def against_fastapi(
    ours: Mapping[str, Side], fastapi: Server, row: Array, region: Region, rounds: int, seconds: float
) -> list[Row]:
    """Compare binary HTTP and gRPC with FastAPI's fastest form."""
    form = PEERS["fastapi"].binary
    assert form is not None
    found = measure(
        {
            "binary": ours["binary"],
            "gRPC": ours["gRPC"],
            "theirs": http_side(fastapi, [form.request(fastapi.address, _MODEL, row)]),
        },
        _CONNECTIONS,
        rounds,
        seconds,
    )
    return [_claim(f"ratio to FastAPI's raw bytes, {name}", found, name, "theirs", 1) for name in ("binary", "gRPC")]


_against = {"triton": against_triton, "fastapi": against_fastapi}


def _claim(what: str, found: Mapping[str, list[Round]], ours: str, theirs: str, goal: float) -> Row:
    return throughput_claim(f"1 MiB identity, requests/s {what}", found[ours], found[theirs], goal)
