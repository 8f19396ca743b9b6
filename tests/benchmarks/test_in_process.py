"""The server without sockets answers everything that it is asked, each way."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import penstock
from benchmarks import in_process
from benchmarks.in_process import NULL_INPUTS, InProcess, NullModel
from benchmarks.requests import grpc_request
from benchmarks.scenarios.telemetry_cost import NoLog
from penstock.perf.http_client import Address
from penstock.perf.oip_client import infer_request

ADDRESS = Address("localhost", 8000)


def counted(server: InProcess) -> int:
    return int(server.statistics.to_dict()["inference_stats"]["success"]["count"])


def drive(work: Callable[[InProcess], Awaitable[None]]) -> int:
    """How many requests the server's statistics counted for ``work``."""

    async def main() -> int:
        server = InProcess(NullModel())
        try:
            async with asyncio.timeout(30):
                await work(server)
            return counted(server)
        finally:
            await server.close()

    return int(in_process.run(main()))


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_the_data_plane_answers_all(at_once: int) -> None:
    assert drive(lambda server: server.infer(200, at_once)) == 200


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("at_once", [1, 7])
def test_http_answers_all(at_once: int, binary: bool) -> None:
    whole = [infer_request(ADDRESS, "m", NULL_INPUTS, binary=binary)]
    assert drive(lambda server: server.http(100, at_once, whole)) == 100


@pytest.mark.parametrize("at_once", [1, 7])
def test_grpc_answers_all(at_once: int) -> None:
    assert drive(lambda server: server.grpc(100, at_once, [grpc_request("m", NULL_INPUTS)])) == 100


def test_a_refusal_is_no_answer() -> None:
    wrong = {"input": np.zeros((1, 9), np.float32)}
    with pytest.raises(RuntimeError, match="400"):
        drive(lambda server: server.http(10, 2, [infer_request(ADDRESS, "m", wrong, binary=False)]))
    with pytest.raises(RuntimeError, match="shape"):
        drive(lambda server: server.grpc(10, 2, [grpc_request("m", wrong)]))


def test_a_server_without_statistics_answers_as_well() -> None:
    async def main() -> tuple[int, int]:
        server = InProcess(NullModel(), NoLog)
        await server.http(50, 5, [infer_request(ADDRESS, "m", NULL_INPUTS, binary=True)])
        pending = server.statistics.pending
        await server.close()
        return counted(server), pending

    assert in_process.run(main()) == (0, 0)


SOURCE = str(Path(penstock.__file__).parent)
CLIENT = f"{SOURCE}{os.sep}perf{os.sep}"
COUNTED = 1280


def bytecodes(work: Callable[[InProcess, int], Awaitable[None]]) -> float:
    """The number of bytecodes that the server executes for each of the requests that ``work`` sends."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        path = frame.f_code.co_filename
        if not path.startswith(SOURCE) or path.startswith(CLIENT):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    async def traced(server: InProcess) -> None:
        await work(server, COUNTED)
        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            await work(server, COUNTED)
        finally:
            sys.settrace(before)

    assert drive(traced) == 2 * COUNTED
    return count / COUNTED


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each version of Python has its own bytecodes")
@pytest.mark.parametrize(("kind", "most"), [("JSON", 1_020), ("binary", 945), ("gRPC", 1_710)])
def test_a_small_request_takes_few_steps(kind: str, most: int) -> None:
    """Many small additions to the path of a request are hard to see in noisy timings."""
    if kind == "gRPC":
        found = bytecodes(lambda server, count: server.grpc(count, 64, [grpc_request("m", NULL_INPUTS)]))
    else:
        whole = [infer_request(ADDRESS, "m", NULL_INPUTS, binary=kind == "binary")]
        found = bytecodes(lambda server, count: server.http(count, 64, whole))
    assert found <= most
