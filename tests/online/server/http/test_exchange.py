"""Inference over HTTP in all forms: compressed, classified, raw, in shared memory, with keys, and cancelled."""

import gc
import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory as Block
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st

from garbage import new_objects_only
from http_servers import LOOPS, PATIENCE_S, Client, GatedServer, get, infer, post
from penstock.clock import SystemClock
from penstock.online.server.access.auth import Access
from penstock.online.server.http import compression
from penstock.online.server.to_thread import Steps
from penstock.tensor import DataType, Signature, TensorSpec, to_wire
from penstock.testing import FakeModel

IDENTITIES = {datatype.value.lower(): datatype for datatype in DataType}


def identity(datatype: DataType) -> FakeModel:
    signature = Signature((TensorSpec("x", datatype, (-1, -1)),), (TensorSpec("y", datatype, (-1, -1)),))
    return FakeModel(signature, lambda inputs: {"y": inputs["x"]})


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    models = {name: identity(datatype) for name, datatype in IDENTITIES.items()}
    with GatedServer(request.param, models, max_request_bytes=4_000_000) as server:
        server.repository.find("fp32").labels = {"y": ["cat", "dog"]}
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


@pytest.fixture
def library(server: GatedServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient("{}:{}".format(*server.address))
    yield client
    client.close()


def make_input(array: np.ndarray, datatype: str, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def sample(datatype: DataType, rows: int = 2) -> np.ndarray:
    if datatype is DataType.BYTES:
        return np.array([[b"a\0\xff", b""], [b"x" * 300, "é".encode()]] * rows, object)[:rows]
    return np.arange(3 * rows).reshape(rows, 3).astype(datatype.dtype)


def ask_json(client: Client, body: dict[str, Any], model: str = "fp32", headers: str = "") -> Any:
    return client.ask(post(json.dumps(body).encode(), headers, f"/v2/models/{model}/infer"))


def tensor(values: list[list[float]], **more: Any) -> dict[str, Any]:
    one = {"name": "x", "datatype": "FP32", "shape": [len(values), len(values[0])], "data": values}
    return {"inputs": [one], **more}


# Datatypes


@pytest.mark.parametrize("name", sorted(IDENTITIES))
def test_every_datatype_in_binary(client: Client, name: str) -> None:
    datatype = IDENTITIES[name]
    array = sample(datatype)
    raw = bytes(to_wire(array))
    head = {
        "name": "x",
        "datatype": datatype.value,
        "shape": array.shape,
        "parameters": {"binary_data_size": len(raw)},
    }
    text = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    for _ in range(2):
        length = f"Inference-Header-Content-Length: {len(text)}\r\n"
        answer = client.ask(post(text + raw, length, f"/v2/models/{name}/infer"))
        assert answer.status == 200
        assert answer.body[int(answer.headers["inference-header-content-length"]) :] == raw


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("name", sorted(set(IDENTITIES) - {"fp16", "bf16", "bytes"}))
def test_every_datatype_by_the_library(library: triton.InferenceServerClient, name: str, binary: bool) -> None:
    array = sample(IDENTITIES[name])
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    answer = library.infer(name, [make_input(array, name.upper(), binary)], outputs=outputs)
    np.testing.assert_array_equal(answer.as_numpy("y"), array)


def test_zero_size_tensors(client: Client) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 0], "data": []}]}
    assert json.loads(ask_json(client, body).body)["outputs"][0] == {
        "name": "y",
        "datatype": "FP32",
        "shape": [1, 0],
        "data": [],
    }


@pytest.mark.parametrize("size", [1, 2000, 20_000, 900_000])
def test_answers_of_any_size(library: triton.InferenceServerClient, size: int) -> None:
    array = np.random.default_rng(0).standard_normal((1, size), np.float32)
    answer = library.infer("fp32", [make_input(array, "FP32")])
    np.testing.assert_array_equal(answer.as_numpy("y"), array)


def test_large_answers_keep_their_place_on_a_pipelined_connection(client: Client) -> None:
    large = np.arange(100_000, dtype=np.float32).tobytes()
    path, headers = "/v2/models/fp32/infer", "Inference-Header-Content-Length: 0\r\n"
    client.send(infer(1) + post(large, headers, path) + infer(2) + post(large, headers, path) + get("/v2/health/live"))
    assert client.read().data == [2, 0]
    assert client.read().body.endswith(large)
    assert client.read().data == [4, 0]
    assert client.read().body.endswith(large)
    assert client.read().status == 200


# Forms


def test_a_raw_request(client: Client) -> None:
    raw = np.arange(6, dtype=np.float32).tobytes()
    for _ in range(2):
        answer = client.ask(post(raw, "Inference-Header-Content-Length: 0\r\n", "/v2/models/fp32/infer"))
        length = int(answer.headers["inference-header-content-length"])
        assert json.loads(answer.body[:length])["outputs"][0]["shape"] == [1, 6]
        assert answer.body[length:] == raw
    text = client.ask(post(b"\xff\0", "Inference-Header-Content-Length: 0\r\n", "/v2/models/bytes/infer"))
    assert text.body.endswith(b"\x02\0\0\0\xff\0")
    refused = client.ask(post(b"123", "Inference-Header-Content-Length: 0\r\n"))
    assert (refused.status, "cannot have 3 bytes" in refused.error) == (400, True)


def test_classification(client: Client, library: triton.InferenceServerClient) -> None:
    wanted = {"outputs": [{"name": "y", "parameters": {"classification": 2}}]}
    (output,) = json.loads(ask_json(client, tensor([[0.25, 0.5, 1], [3, 1, 2]], **wanted)).body)["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    assert output["data"] == ["1.000000:2", "0.500000:1:dog", "3.000000:0:cat", "2.000000:2"]
    array = np.array([[1, 5, 3]], np.int32)
    answer = library.infer(
        "int32", [make_input(array, "INT32")], outputs=[triton.InferRequestedOutput("y", class_count=2)]
    )
    assert answer.as_numpy("y").tolist() == [[b"5:1", b"3:2"]]
    text = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}], **wanted}
    refused = ask_json(client, text, "bytes")
    assert (refused.status, "of datatype BYTES cannot be classified" in refused.error) == (400, True)


def test_parameters_are_read_and_reserved_ones_refused(client: Client) -> None:
    assert ask_json(client, tensor([[1]], parameters={"priority": 1, "timeout": 10_000_000, "mine": "a"})).status == 200
    assert "reserved" in ask_json(client, tensor([[1]], parameters={"triton_x": 1})).error
    assert "'priority'" in ask_json(client, tensor([[1]], parameters={"priority": "high"})).error


def test_shared_memory_in_and_out(client: Client, library: triton.InferenceServerClient) -> None:
    block = Block(create=True, size=64)
    try:
        x = np.array([[1, 2, 3]], np.float32)
        block.buf[:12] = x.tobytes()
        library.register_system_shared_memory("r", "/" + block.name, 64)
        (region,) = library.get_system_shared_memory_status()
        assert (region["name"], region["byte_size"]) == ("r", 64)
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
        body: dict[str, Any] = {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": place}],
            "outputs": [{"name": "y", "parameters": place | {"shared_memory_offset": 16}}],
        }
        for _ in range(2):
            answer = json.loads(ask_json(client, body).body)
            assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 3]}]
            assert bytes(block.buf[16:28]) == x.tobytes()
            block.buf[16:28] = bytes(12)
        small = {**body, "outputs": [{"name": "y", "parameters": place | {"shared_memory_byte_size": 4}}]}
        assert "at least 12 bytes" in ask_json(client, small).error
        outside = {**body, "outputs": [{"name": "y", "parameters": place | {"shared_memory_offset": 60}}]}
        assert ask_json(client, outside).status == 400
        library.unregister_system_shared_memory("r")
        assert ask_json(client, body).status == 404
    finally:
        block.close()
        block.unlink()


# Compression


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "x-gzip"])
def test_compressed_requests(client: Client, encoding: str) -> None:
    compress = zlib.compress if encoding == "deflate" else gzip.compress
    headers = f"Content-Encoding: {encoding}\r\n"
    values = [[float(n) for n in range(3000)]]
    answer = ask_json_compressed(client, tensor(values), compress, headers)
    assert json.loads(answer.body)["outputs"][0]["data"] == values[0]
    small = ask_json_compressed(client, tensor([[1]]), compress, headers)
    assert json.loads(small.body)["outputs"][0]["data"] == [1]


def ask_json_compressed(client: Client, body: dict[str, Any], compress: Any, headers: str) -> Any:
    return client.ask(post(compress(json.dumps(body).encode()), headers, "/v2/models/fp32/infer"))


def test_the_json_length_counts_after_decompression(client: Client) -> None:
    raw = np.arange(2000, dtype=np.float32).tobytes()
    head = {"name": "x", "datatype": "FP32", "shape": [1, 2000], "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [head]}).encode()
    headers = f"Content-Encoding: gzip\r\nInference-Header-Content-Length: {len(text)}\r\n"
    answer = client.ask(post(gzip.compress(text + raw), headers, "/v2/models/fp32/infer"))
    assert json.loads(answer.body)["outputs"][0]["data"][-1] == 1999


def test_bodies_that_cannot_be_decompressed(client: Client) -> None:
    unknown = client.ask(post(b"abc", "Content-Encoding: br\r\n"))
    assert (unknown.status, unknown.headers["accept-encoding"]) == (501, "gzip, deflate")
    assert client.ask(post(b"abc", "Content-Encoding: gzip\r\n")).status == 400
    assert client.ask(post(b"a" * 5000, "Content-Encoding: deflate\r\n")).status == 400
    bomb = client.ask(post(gzip.compress(bytes(100_000_000)), "Content-Encoding: gzip\r\n"))
    assert (bomb.status, "larger than 4000000 bytes" in bomb.error) == (413, True)


def test_compressed_requests_keep_their_place(client: Client) -> None:
    values = tensor([[float(n) for n in range(3000)]])
    body = gzip.compress(json.dumps(values).encode())
    client.send(post(body, "Content-Encoding: gzip\r\n", "/v2/models/fp32/infer") + infer(1))
    assert len(client.read().data) == 3000
    assert client.read().data == [2, 0]


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("gzip", "gzip"), ("deflate, gzip;q=0", "deflate"), ("br", None), ("gzip;q=0", None), ("identity", None)],
)
def test_compressed_answers(client: Client, accept: str, encoding: str | None) -> None:
    headers = f"Accept-Encoding: {accept}\r\n"
    client.send(
        post(json.dumps(tensor([[float(n) for n in range(3000)]])).encode(), headers, "/v2/models/fp32/infer")
        + infer(1, headers)
    )
    answer = client.read()
    assert answer.headers.get("content-encoding") == encoding
    body = answer.body
    if encoding is not None:
        assert len(body) < 15_000
        body = (gzip.decompress if encoding == "gzip" else zlib.decompress)(body)
    assert json.loads(body)["outputs"][0]["data"][-1] == 2999
    assert client.read().data == [2, 0]


def test_answers_below_four_kib_are_not_compressed(client: Client) -> None:
    for count, encoding in ((300, None), (3000, "gzip")):
        body = json.dumps(tensor([[1.5] * count])).encode()
        answer = client.ask(post(body, "Accept-Encoding: gzip\r\n", "/v2/models/fp32/infer"))
        assert answer.headers.get("content-encoding") == encoding
        assert (len(answer.body) > 1024) is (encoding is None)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways_by_the_library(library: triton.InferenceServerClient, algorithm: str) -> None:
    array = np.zeros((4, 2000), np.float32)
    answer = library.infer(
        "fp32",
        [make_input(array, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), array)


# Known heads


def test_a_head_seen_before_means_the_same(server: GatedServer, client: Client) -> None:
    server.call(server.context.heads.clear)
    for value in range(5):
        assert client.ask(infer(value)).data == [2 * value, 0]
    assert server.call(lambda: len(server.context.heads)) == 1
    client.send(b"".join(infer(value) for value in range(9)) + infer(9)[:-3])
    assert [client.read().data[0] for _ in range(9)] == [2 * value for value in range(9)]
    assert client.ask(infer(9)[-3:] + infer(1)).data == [18, 0]
    assert client.read().data == [2, 0]
    head, _, body = infer(7).partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.ask(body).data == [14, 0]


def test_requests_split_anywhere_between_known_heads(client: Client) -> None:
    whole = infer(1) + infer(2) + infer(3)
    for cut in range(1, len(whole)):
        client.send(whole[:cut])
        client.send(whole[cut:])
        assert [client.read().data[0] for _ in range(3)] == [2, 4, 6]


MIXED = [
    (infer(1), 200),
    (get("/v2/models/m/stats"), 200),
    (post(b'{"x":[1,2]}', path="/v2/models/m/generate_stream"), 200),
    (post(gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip\r\n"), 400),
    (infer(2, "Accept-Encoding: gzip\r\nX-Any: thing\r\n"), 200),
    (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
        400,
    ),
    (post(np.float32([1, 2]).tobytes(), "Inference-Header-Content-Length: 0\r\n"), 200),
    (get("/nothing"), 404),
]


@given(st.lists(st.sampled_from(MIXED), min_size=1, max_size=12), st.lists(st.integers(1, 400), max_size=12))
def test_any_requests_in_any_pieces(server: GatedServer, requests: list[tuple[bytes, int]], sizes: list[int]) -> None:
    rest = b"".join(request for request, _ in requests)
    with Client(server.address) as client:
        for size in sizes:
            client.send(rest[:size])
            rest = rest[size:]
        client.send(rest)
        assert [client.read().status for _ in requests] == [status for _, status in requests]


@given(st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=3)), min_size=1, max_size=5))
def test_mutated_requests_never_keep_others_from_their_answers(
    server: GatedServer, changes: list[tuple[int, bytes]]
) -> None:
    sent = bytearray(infer(1) + infer(2, "Content-Encoding: gzip\r\n"))
    for place, data in changes:
        sent[place : place + len(data)] = data
    with Client(server.address) as client:
        client.send(bytes(sent))
        client.socket.shutdown(1)
        while client.socket.recv(65536):
            pass
    with Client(server.address) as client:
        assert client.ask(infer(3)).data == [6, 0]


def test_requests_leave_nothing_to_the_collector(server: GatedServer, client: Client) -> None:
    for request, _ in MIXED:
        client.ask(request)
        # Garbage of earlier tests may disturb a measurement, but not all of them.
        assert min(garbage_of(lambda: client.ask(request)) for _ in range(4)) < 50  # noqa: B023


def garbage_of(ask: Callable[[], object]) -> int:
    """The number of objects in reference cycles after 50 repetitions."""
    with new_objects_only():
        for _ in range(50):
            ask()
        return gc.collect()


@pytest.mark.parametrize(
    "odd",
    [
        b"POST /v2/models/m/infer HTTP/1.1\nHost: localhost\n\n",
        b"\r\n" + get("/v2/health/live"),
        post(b"\r\n\r\n" * 5),
        infer(1, "Transfer-Encoding: identity\r\n"),
    ],
)
def test_what_ends_otherwise_is_not_remembered_wrongly(server: GatedServer, odd: bytes) -> None:
    statuses = []
    for _ in range(2):
        with Client(server.address) as client:
            client.send(odd + infer(4))
            statuses.append(client.read().status)
            if statuses[-1] != 400 or odd.startswith(
                b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-L"
            ):
                assert client.read().data == [8, 0]
    assert statuses[0] == statuses[1]


def test_the_key_is_asked_for_each_time(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[clients.alice]\nkey = "alice-0123456789"\nmodels = ["m"]\n'
        '[clients.root]\nkey = "root-0123456789ab"\nadmin = true\n'
    )
    alice, root = ("Authorization: Bearer alice-0123456789\r\n", "X-API-Key: root-0123456789ab\r\n")
    with GatedServer(also={"n": identity(DataType.FP32)}, access=Access(keys, SystemClock())) as server:
        client = server.connect()
        for _ in range(2):
            refused = client.ask(infer(1))
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert client.ask(infer(1, "Authorization: Bearer wrong-key-0123456\r\n")).status == 401
            assert client.ask(infer(1, alice)).data == [2, 0]
            assert client.ask(infer(1, root)).data == [2, 0]
        assert client.ask(get("/v2/models/n", alice)).status == 403
        assert client.ask(get("/v2/models/n", root)).status == 200
        assert client.ask(get("/v2/logging", alice)).status == 403
        assert client.ask(get("/v2/logging", root)).status == 200
        for kind in ("system", "cuda"):
            assert client.ask(get(f"/v2/{kind}sharedmemory/status", alice)).status == 403
            assert client.ask(get(f"/v2/{kind}sharedmemory/status", root)).status == 200
        assert client.ask(get("/v2")).status == 401
        assert client.ask(get("/v2/health/live")).status == 200
        assert client.ask(get("/openapi.json")).status == 200


def test_clients_see_only_the_models_that_they_may_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[clients.alice]\nkey = "alice-0123456789"\nmodels = ["m"]\n[clients.root]\nkey = "root-0123456789ab"\n'
    )
    alice, root = ("X-API-Key: alice-0123456789\r\n", "X-API-Key: root-0123456789ab\r\n")
    with GatedServer(also={"n": identity(DataType.FP32)}, access=Access(keys, SystemClock())) as server:
        client = server.connect()
        for key, names in ((alice, ["m"]), (root, ["m", "n"])):
            index = client.ask(post(b"{}", key, "/v2/repository/index"))
            assert sorted(row["name"] for row in json.loads(index.body)) == names
            statistics = client.ask(get("/v2/models/stats", key))
            assert sorted(one["name"] for one in json.loads(statistics.body)["model_stats"]) == names


# Cancellation and limits


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_request_whose_client_has_gone_is_not_run(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        first, leaver, stayer = (server.connect() for _ in range(3))
        first.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        leaver.send(infer(2) + infer(3))
        assert server.connect().ask(get("/v2/health/live")).status == 200
        before = server.call(lambda: len(server.connections))
        leaver.close()
        while server.call(lambda: len(server.connections)) == before:
            pass
        stayer.send(infer(4))
        assert server.connect().ask(get("/v2/health/live")).status == 200
        server.gate.set()
        assert (first.read().data, stayer.read().data) == ([2, 0], [8, 0])
        assert [call["x"][:, 0].tolist() for call in server.model.calls] == [[1], [4]]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_leaves_while_its_body_is_inflated_is_not_run(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate, inflate = threading.Semaphore(0), threading.Event(), compression.inflate

    def held(*args: Any) -> Steps[bytearray]:
        yield 0
        entered.release()
        assert gate.wait(PATIENCE_S)
        return (yield from inflate(*args))

    monkeypatch.setattr(compression, "inflate", held)
    body = gzip.compress(json.dumps(tensor([[3.0, 0.0]])).encode() + b" " * 1_500_000)
    with GatedServer(loop, max_bytes=10_000_000) as server:
        leaver = server.connect()
        leaver.send(post(body, "Content-Encoding: gzip\r\n"))
        assert entered.acquire(timeout=PATIENCE_S)
        leaver.close()
        while server.call(lambda: len(server.connections)):
            pass
        gate.set()
        assert server.connect().ask(infer(1)).data == [2, 0]
        while server.call(lambda: server.budget.used or server.context._tasks):
            pass
        assert [call["x"].tolist() for call in server.model.calls] == [[[1, 0]]]


def test_memory_is_reserved_while_a_body_is_inflated() -> None:
    with GatedServer(max_bytes=3_000_000) as server:
        bomb = post(gzip.compress(bytes(60_000_000)), "Content-Encoding: gzip\r\n")
        refused = server.connect().ask(bomb)
        assert (refused.status, refused.error) == (503, str(server.budget.refusal()))
        assert server.call(lambda: server.budget.used) == 0


def test_the_bytes_of_all_requests_together_are_bounded() -> None:
    with GatedServer(max_bytes=100_000, also={"fp32": identity(DataType.FP32)}) as server:
        server.gate.clear()
        waiting, refused, small = (server.connect() for _ in range(3))
        values = json.dumps(tensor([[0.0] * 15_000])).encode()
        waiting.send(post(values)[:-10])
        while server.call(lambda: server.budget.used) < len(values) - 10:
            pass
        answer = refused.ask(post(values, path="/v2/models/fp32/infer"))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert refused.is_closed
        server.gate.set()
        assert small.ask(infer(1)).data == [2, 0]
        waiting.close()
        while server.call(lambda: server.budget.used):
            pass
        again = server.connect()
        fewer = json.dumps(tensor([[0.0] * 3_000])).encode()
        assert again.ask(post(fewer, path="/v2/models/fp32/infer")).status == 200
        packed = post(gzip.compress(fewer), "Content-Encoding: gzip\r\n", "/v2/models/fp32/infer")
        assert again.ask(packed).status == 200
        # The text alone would fit, but not together with its tensor.
        assert again.ask(post(values, path="/v2/models/fp32/infer")).status == 503
        bomb = gzip.compress(json.dumps(tensor([[0.0] * 60_000])).encode())
        assert again.ask(post(bomb, "Content-Encoding: gzip\r\n", "/v2/models/fp32/infer")).status == 503
        assert server.call(lambda: server.budget.used) == 0
