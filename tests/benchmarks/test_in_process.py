"""The server without sockets answers everything that it is asked, each way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

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
