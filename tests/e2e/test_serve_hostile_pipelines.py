"""Requests to a pipeline that try to exhaust the server's memory or to delay other clients."""

from __future__ import annotations

import io
import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from PIL import Image
from tritonclient.utils import InferenceServerException

from picture_pipelines import DECLARATION, pack_corners, picture
from processes import ServerProcess

PIXELS = DECLARATION.replace("outputs: [", "outputs: [pixels, ")
_LIMIT, _FLOOD = 100_000, 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    bundle: Path = pack_corners(tmp_path_factory.mktemp("pixels"), PIXELS)
    with ServerProcess(bundle, arguments=("--grpc-port", "0"), max_response_bytes=_LIMIT) as process:
        yield process


def _run(server: ServerProcess, content: bytes) -> tuple[int, dict[str, Any]]:
    with closing(HTTPConnection(*server.address, timeout=30)) as connection:
        connection.request("POST", "/v2/models/corners/run", content, {"Content-Type": "image/png"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def grpc_address(server: ServerProcess) -> str:
    return next(word for word in server.line.split() if word.startswith("grpc=")).removeprefix("grpc=")


def _infer(client: Any, module: Any, content: bytes, output: str = "pixels", **options: Any) -> np.ndarray:
    tensor = module.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([content], object))
    found: np.ndarray = client.infer("corners", [tensor], **options).as_numpy(output)
    return found


def test_outputs_that_are_too_large_are_refused_by_name(server: ServerProcess) -> None:
    large, small = picture(0, 400), picture(0)
    status, answer = _run(server, large)
    assert (status, "output 'pixels' has the shape [400, 400, 1]" in answer["error"]) == (413, True)
    status, answer = _run(server, small)
    pixels = np.array(answer["pixels"], np.uint8)
    text = {"outputs": [http_client.InferRequestedOutput("pixels", binary_data=False)]}
    with (
        http_client.InferenceServerClient("{}:{}".format(*server.address)) as over_http,
        grpc_client.InferenceServerClient(grpc_address(server)) as over_grpc,
    ):
        for client, module, options in (
            (over_http, http_client, {}),
            (over_http, http_client, text),
            (over_grpc, grpc_client, {}),
        ):
            with pytest.raises(InferenceServerException, match=f"may have at most {_LIMIT}: output 'pixels'") as caught:
                _infer(client, module, large, **options)
            assert caught.value.status() in ("413", "StatusCode.RESOURCE_EXHAUSTED")
            np.testing.assert_array_equal(_infer(client, module, small, **options), pixels)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_small_request_passes_a_flood_of_other_connections(tmp_path: Path, protocol: str) -> None:
    file = io.BytesIO()
    Image.new("L", (6_000, 6_000)).save(file, "PNG")
    flood, small = file.getvalue(), picture(0, 16)
    head = f"POST /v2/models/corners/run HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(flood)}\r\n\r\n"
    with ServerProcess(pack_corners(tmp_path), arguments=("--grpc-port", "0")) as server, ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.address)) for _ in range(_FLOOD)]
        for connection in connections:
            connection.sendall(head.encode() + flood)
        assert select.select(connections, [], [], 60)[0]
        if protocol == "http":
            assert _run(server, small)[0] == 200
        else:
            with grpc_client.InferenceServerClient(grpc_address(server)) as client:
                _infer(client, grpc_client, small, "probabilities")
        assert len(select.select(connections, [], [], 0)[0]) < _FLOOD // 2
