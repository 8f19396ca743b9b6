"""Bodies that are large enough to bypass the parser."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from http_servers import LOOPS, Answer, Client, GatedServer, get, infer, post
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

BIG = 250_000
SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),))


def tensor(seed: int, count: int = BIG) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, count)).astype(np.float32)


def binary(array: np.ndarray, headers: str = "") -> bytes:
    raw = array.tobytes()
    one = {"name": "x", "datatype": "FP32", "shape": array.shape, "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    headers += f"Inference-Header-Content-Length: {len(text)}\r\n"
    return post(text + raw, headers, "/v2/models/same/infer")


def output(answer: Answer) -> np.ndarray:
    assert answer.status == 200
    return np.frombuffer(answer.body[int(answer.headers["inference-header-content-length"]) :], np.float32)


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    same = FakeModel(SIGNATURE, lambda inputs: {"y": inputs["x"]})
    with GatedServer(request.param, {"same": same}, max_request_bytes=4_000_000, max_bytes=8_000_000) as server:
        yield server
        assert server.call(lambda: server.budget.used) == 0


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
    assert server.connect().ask(infer(21)).data == [42, 0]


def wait_for(server: GatedServer, used: int) -> None:
    while server.call(lambda: server.budget.used) < used:
        pass


@pytest.mark.parametrize("seed", range(4))
def test_in_pieces_of_any_size_with_others_before_and_behind(client: Client, seed: int) -> None:
    rng = random.Random(seed)
    arrays = [tensor(number, rng.randint(BIG // 8, BIG)) for number in range(4)]
    stream = b"".join(infer(number) + binary(array) for number, array in enumerate(arrays))
    while stream:
        cut = rng.choice([1, 300, 20_000, 70_000, 500_000])
        client.send(stream[:cut])
        stream = stream[cut:]
    for number, array in enumerate(arrays):
        assert client.read().data == [2 * number, 0]
        assert np.array_equal(output(client.read()), array[0])


def test_after_expect_continue(client: Client) -> None:
    array = tensor(1)
    head, _, body = binary(array, "Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.read().status == 100
    client.send(body)
    assert np.array_equal(output(client.read()), array[0])


def test_json_is_read_from_there_too(client: Client) -> None:
    array = np.arange(60_000.0, dtype=np.float32)[None]
    one = {"name": "x", "datatype": "FP32", "shape": array.shape, "data": array[0].tolist()}
    answer = client.ask(post(json.dumps({"inputs": [one]}).encode(), path="/v2/models/same/infer"))
    assert answer.data == array[0].tolist()
    answer = client.ask(post(b"[" + b" " * 300_000, path="/v2/models/same/infer"))
    assert (answer.status, "not an inference request" in answer.error) == (400, True)


def test_the_last_request_of_a_connection(client: Client) -> None:
    array = tensor(2)
    assert np.array_equal(output(client.ask(binary(array, "Connection: close\r\n"))), array[0])
    assert client.is_closed


def test_clients_that_leave_give_their_memory_back(server: GatedServer) -> None:
    for half_close in (False, True):
        client = Client(server.address)
        client.send(binary(tensor(3))[:-1])
        wait_for(server, 4 * BIG)
        if half_close:
            client.socket.shutdown(1)
            assert client.is_closed
        client.close()
        while server.call(lambda: server.budget.used):
            pass


def test_a_client_that_stops_half_way_is_told_so(server: GatedServer) -> None:
    with Client(server.address) as client:
        client.send(binary(tensor(4))[:-1])
        wait_for(server, 4 * BIG)
        server.pass_time(1000)
        assert client.read().status == 408
        client.send(b"x" * 100_000)
        assert server.connect().ask(get("/v2/health/live")).status == 200
        assert server.call(lambda: server.budget.used) == 0


def test_what_is_only_announced_takes_no_memory(server: GatedServer) -> None:
    with Client(server.address) as client:
        request = binary(tensor(5))
        client.send(request[:30_000])
        wait_for(server, 1)
        assert server.call(lambda: server.budget.used) <= 8 * 30_000
        client.send(request[30_000:])
        assert client.read().status == 200


def test_no_room_for_the_rest_is_told() -> None:
    with GatedServer(max_bytes=600_000) as server:
        client = server.connect()
        request = binary(tensor(6))
        client.send(request[:70_000])
        wait_for(server, 500_000)
        client.send(request[70_000:])
        assert client.read().status == 503
        client.close()
        while server.call(lambda: server.budget.used):
            pass
