"""Requests made by hand are what a real server takes, each way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks import models, servers
from benchmarks.requests import grpc_answer, grpc_request, shared_region
from benchmarks.rounds import burst, grpc_side, http_side
from penstock.perf.http_client import HttpSession
from penstock.protocol import messages

ROW = np.arange(16, dtype=np.float32)[None]


def test_a_grpc_request_is_the_protocols_message() -> None:
    framed = grpc_request("m", {"input": ROW})
    assert framed[:5] == b"\0" + (len(framed) - 5).to_bytes(4, "big")
    read = messages.ModelInferRequest.FromString(framed[5:])
    assert (read.model_name, read.inputs[0].name, read.inputs[0].datatype) == ("m", "input", "FP32")
    assert list(read.inputs[0].shape) == [1, 16]
    assert read.raw_input_contents[0] == ROW.tobytes()


@pytest.mark.parametrize("raw", [False, True])
def test_a_grpc_answer_is_read_raw_and_typed(raw: bool) -> None:
    answer = messages.ModelInferResponse(model_name="m")
    output = answer.outputs.add(name="output", datatype="FP32", shape=[1, 16])
    if raw:
        answer.raw_output_contents.append(ROW.tobytes())
    else:
        output.contents.fp32_contents.extend(ROW[0].tolist())
    np.testing.assert_array_equal(grpc_answer(answer.SerializeToString())["output"], ROW)


def test_grpc_and_shared_memory_against_a_real_server(tmp_path: Path) -> None:
    model = models.identity(tmp_path / "identity.onnx", 16)
    with servers.penstock(model, servers.split_cores()[0]) as server, shared_region(ROW, 3) as region:
        assert burst(grpc_side(server, "identity", [{"input": ROW}]), 4, 0.1).throughput > 0
        shared = http_side(server, region.requests(server, "identity"))
        assert not region.answered
        assert burst(shared, 1, 0.2).throughput > 0
        assert region.answered
        region.clear()
        assert not region.answered
    assert not list(Path("/dev/shm").glob(region.name))


def test_a_server_that_refuses_shared_memory_says_so(tmp_path: Path) -> None:
    model = models.identity(tmp_path / "identity.onnx", 16)
    cores, _ = servers.split_cores()
    with servers.penstock(model, cores, allow_client_shm="false") as server, shared_region(ROW, 1) as region:
        with pytest.raises(RuntimeError, match="refuses shared memory"):
            region.requests(server, "identity")

        async def ask() -> int:
            session = HttpSession(server.address)
            try:
                return (await session.ask(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")).status
            finally:
                session.close()

        assert asyncio.run(ask()) == 200
