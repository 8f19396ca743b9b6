"""A request looks up its model once, and keeps that version until it is answered."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from http_servers import PATIENCE_S, Client, GatedServer, infer, post


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with GatedServer() as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [3, 4]}


def test_classes_of_a_version_that_is_unloaded_while_it_answers() -> None:
    with GatedServer() as server:
        client = server.connect()
        server.call(lambda: setattr(server.repository.find("m"), "labels", {"y": ["cat", "dog"]}))
        server.gate.clear()
        body = {"inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {"classification": 1}}]}
        client.send(post(json.dumps(body).encode()))
        assert server.entered.acquire(timeout=PATIENCE_S)
        handle = server.call(lambda: server.repository.remove("m", "1"))
        assert server.connect().ask(infer(1)).status == 404
        server.gate.set()
        answer = client.read()
        assert (answer.status, json.loads(answer.body)["outputs"][0]["data"]) == (200, ["8.000000:1:dog"])
        asyncio.run_coroutine_threadsafe(handle.unload(), server.loop).result(PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/m/infer", {"inputs": [TENSOR]}),
        ("/v2/models/m/infer", {"inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {"classification": 1}}]}),
        ("/v2/models/m/generate", {"x": [3, 4]}),
        ("/v2/models/m/generate_stream", {"x": [3, 4]}),
        ("/v1/models/m:predict", {"instances": [[3, 4]]}),
        ("/v1/models/m:classify", {"examples": [{"x": [3, 4]}]}),
        ("/v1/models/m/versions/1:predict", {"inputs": [[3, 4]]}),
        ("/predictions/m", [3, 4]),
    ],
)
def test_a_request_looks_its_model_up_once(server: GatedServer, client: Client, path: str, body: Any) -> None:
    before = server.repository.looks
    assert client.ask(post(json.dumps(body).encode(), path=path)).status == 200
    assert server.repository.looks == before + 1


def test_a_raw_request_looks_its_model_up_once(server: GatedServer, client: Client) -> None:
    before = server.repository.looks
    assert client.ask(post(bytes(8), "Inference-Header-Content-Length: 0\r\n")).status == 200
    assert server.repository.looks == before + 1
