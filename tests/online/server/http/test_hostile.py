"""Clients that try to delay others, or to exhaust the server's memory: only they themselves are affected."""

import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from garbage import uncollected
from http_servers import LOOPS, PATIENCE_S, GatedServer, get, infer, post
from penstock.clock import SystemClock
from penstock.errors import Unauthenticated
from penstock.online.server.access.auth import Access
from penstock.online.server.access.gate import Gate, Passage
from penstock.online.server.http import compression
from penstock.online.server.http.codec import json_request, large_json
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.http.exchange import Exchange
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

KEY = "Authorization: Bearer alice-0123456789\r\n"


def rows(datatype: DataType = DataType.FP32) -> FakeModel:
    signature = Signature((TensorSpec("x", datatype, (-1, -1)),), (TensorSpec("y", datatype, (-1, -1)),))
    return FakeModel(signature, lambda inputs: {"y": inputs["x"]})


def widen(size: int) -> FakeModel:
    """Responds to a number with ``size`` numbers."""
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, 1)),), (TensorSpec("y", DataType.FP32, (-1, size)),))
    return FakeModel(signature, lambda inputs: {"y": np.repeat(inputs["x"], size, axis=1)})


class HeldExecutor(ThreadPoolExecutor):
    """An executor that starts no work while ``gate`` is clear; ``asked`` counts the submitted work."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gate = threading.Event()
        self.asked = threading.Semaphore(0)

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        def run() -> Any:
            assert self.gate.wait(PATIENCE_S)
            return work(*args, **more)

        self.asked.release()
        return super().submit(run)


@contextmanager
def held(server: GatedServer) -> Iterator[HeldExecutor]:
    """While the executor is held, no thread except the event loop's decodes or encodes."""
    executor = HeldExecutor()
    server.call(lambda: server.loop.set_default_executor(executor))
    try:
        yield executor
    finally:
        executor.gate.set()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GatedServer]:
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients.alice]\nkey = "alice-0123456789"\n')
    with GatedServer(access=Access(keys, SystemClock())) as server:
        yield server


# Unknown clients


@pytest.mark.parametrize("more", ["Content-Length: 1000000\r\n", "Expect: 100-continue\r\nContent-Length: 5\r\n"])
def test_an_unknown_client_is_refused_before_its_body_arrives(guarded: GatedServer, more: str) -> None:
    client = guarded.connect()
    client.send(f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
    refused = client.read()
    assert (refused.status, refused.headers["connection"]) == (401, "close")
    assert client.is_closed


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/nothing", "/v2"])
def test_a_long_body_of_a_refused_request_is_not_kept(guarded: GatedServer, path: str) -> None:
    client = guarded.connect()
    client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    chunk = b"1000\r\n" + bytes(4096) + b"\r\n"
    client.send(chunk * 5)
    refused = client.read()
    assert refused.status in (401, 404, 405)
    assert guarded.call(lambda: guarded.budget.used) == 0
    assert client.is_closed


def test_a_short_body_of_a_refused_request_leaves_the_connection(guarded: GatedServer) -> None:
    client = guarded.connect()
    for body in (bytes(10_000), b""):
        assert client.ask(post(body)).status == 401
        client.send(post(body)[:40])
        client.send(post(body)[40:])
        assert client.read().status == 401
        assert client.ask(infer(1, KEY)).data == [2, 0]


@pytest.mark.parametrize("body", [b"", bytes(10_000), bytes(60_000)])
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/logging", "/v2/repository/index"])
def test_a_refusal_leaves_no_garbage(guarded: GatedServer, path: str, body: bytes) -> None:
    kinds = (Http1Connection, Exchange, Unauthenticated, FrameType)
    with uncollected(*kinds) as alive:
        with guarded.connect() as client:
            assert client.ask(post(body, path=path)).status == 401
        with guarded.connect() as client:
            client.send(post(body, path=path)[:-1])
        deadline = time.monotonic() + PATIENCE_S
        while found := guarded.call(alive):
            assert time.monotonic() < deadline, found


def test_nothing_of_an_unknown_client_is_decoded(guarded: GatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    for module, name in ((compression, "inflate"), (large_json, "read"), (json_request, "_decode_request")):
        monkeypatch.setattr(module, name, never)
    for path in (
        "/v2/models/m/infer",
        "/v2/models/m/generate",
        "/v1/models/m:predict",
        "/predictions/m",
        "/v2/logging",
    ):
        client = guarded.connect()
        assert client.ask(post(gzip.compress(bytes(60_000)), "Content-Encoding: gzip\r\n", path)).status == 401
        assert client.ask(post(b"[" * 10_000, path=path)).status == 401


def test_a_known_client_continues(guarded: GatedServer) -> None:
    client = guarded.connect()
    request = infer(3, KEY + "Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.read().status == 100
    client.send(body)
    assert client.read().data == [6, 0]


# Clients that keep the event loop busy


def numbers(count: int) -> str:
    return ",".join(["1.5"] * count)


def oip(count: int) -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (count, numbers(count).encode())


BODIES = {
    "json": ("/v2/models/rows/infer", oip, ""),
    "gzip": ("/v2/models/rows/infer", lambda count: gzip.compress(oip(count)), "Content-Encoding: gzip\r\n"),
    "generate": ("/v2/models/rows/generate", lambda count: b'{"x":[[%b]]}' % numbers(count).encode(), ""),
    "predict": ("/v1/models/rows:predict", lambda count: b'{"instances":[[%b]]}' % numbers(count).encode(), ""),
    "columns": ("/v1/models/rows:predict", lambda count: b'{"inputs":[[%b]]}' % numbers(count).encode(), ""),
    "named": ("/v1/models/rows:predict", lambda count: b'{"instances":[{"x":[%b]}]}' % numbers(count).encode(), ""),
    "classify": ("/v1/models/rows:classify", lambda count: b'{"examples":[{"x":[%b]}]}' % numbers(count).encode(), ""),
    "torchserve": ("/predictions/rows", lambda count: b"[[%b]]" % numbers(count).encode(), ""),
}


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    models = {"rows": rows(), "bytes": rows(DataType.BYTES), "wide": widen(50_000)}
    with GatedServer(request.param, models) as server:
        yield server


@pytest.mark.parametrize("count", [2_000, 100_000])
@pytest.mark.parametrize("form", sorted(BODIES))
def test_others_are_answered_while_a_body_is_decoded(server: GatedServer, form: str, count: int) -> None:
    path, make, headers = BODIES[form]
    attacker, innocent = server.connect(), server.connect()
    with held(server) as executor:
        attacker.send(post(make(count), headers, path))
        assert executor.asked.acquire(timeout=PATIENCE_S)
        assert innocent.ask(infer(1)).data == [2, 0]
        executor.gate.set()
        answer = attacker.read()
    assert answer.status == 200, answer.error
    assert answer.body.count(b"1.5") == count
    assert server.call(lambda: server.budget.used) == 0


def test_others_are_answered_while_texts_are_read(server: GatedServer) -> None:
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in [b"abc"] * 5_000)
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 5000], "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    attacker, innocent = server.connect(), server.connect()
    with held(server) as executor:
        length = f"Inference-Header-Content-Length: {len(text)}\r\n"
        attacker.send(post(text + raw, length, "/v2/models/bytes/infer"))
        assert executor.asked.acquire(timeout=PATIENCE_S)
        assert innocent.ask(infer(1)).data == [2, 0]
        executor.gate.set()
        assert attacker.read().body.endswith(raw)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/wide/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}]}),
        ("/v2/models/wide/generate", {"x": 1.5}),
        ("/v2/models/wide/generate_stream", {"x": 1.5}),
        ("/v1/models/wide:predict", {"instances": [[1.5]]}),
        ("/predictions/wide", [1.5]),
    ],
)
def test_others_are_answered_while_an_answer_is_encoded(server: GatedServer, path: str, body: Any) -> None:
    attacker, innocent = server.connect(), server.connect()
    with held(server) as executor:
        attacker.send(post(json.dumps(body).encode(), path=path))
        assert executor.asked.acquire(timeout=PATIENCE_S)
        assert innocent.ask(infer(1)).data == [2, 0]
        executor.gate.set()
        answer = attacker.read()
    assert answer.status == 200
    assert answer.body.count(b"1.5") == 50_000


def test_others_are_answered_while_one_long_text_is_encoded(server: GatedServer) -> None:
    attacker, innocent = server.connect(), server.connect()
    text = b"a" * 3_000
    body = b'{"x":[["%b","%b"]]}' % (text, text[:900])
    with held(server) as executor:
        attacker.send(post(body, path="/v2/models/bytes/generate"))
        assert not executor.asked.acquire(blocking=False)
        assert innocent.ask(infer(1)).data == [2, 0]
        executor.gate.set()
        assert attacker.read().body.count(b"a" * 900) == 4
    with held(server) as executor:
        attacker.send(post(b'{"x":[["%b"]]}' % (text * 2), path="/v2/models/bytes/generate"))
        for _ in ("decode", "encode"):
            assert executor.asked.acquire(timeout=PATIENCE_S)
            assert innocent.ask(infer(1)).data == [2, 0]
            executor.gate.set()
        assert text * 2 in attacker.read().body


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting", "/v2/repository/index", "/v2", "/nothing"])
def test_bodies_without_tensors_are_short(server: GatedServer, path: str) -> None:
    client = server.connect()
    assert client.ask(post(bytes(70_000), path=path)).status in (404, 405, 413)
    client = server.connect()
    packed = gzip.compress(b" " * 1_000_000)
    assert client.ask(post(packed, "Content-Encoding: gzip\r\n", path)).status in (404, 405, 413)
    assert client.ask(infer(1)).data == [2, 0]


def test_a_load_with_many_members_is_refused(server: GatedServer) -> None:
    body = b'{"parameters":{%b}}' % b",".join(b'"%d":1' % number for number in range(100_000))
    answer = server.connect().ask(post(body, path="/v2/repository/models/m/load"))
    assert (answer.status, "more than 65536 members" in answer.error) == (400, True)


# Clients that take memory


class Watched(Gate):
    """Records the maximum number of bytes held at once."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, patience_s=1e6, aside=0)
        self.most = 0

    def count(self, passage: Passage, size: int) -> None:
        super().count(passage, size)
        self.most = max(self.most, self.used)

    async def wait(self, passage: Passage, size: int) -> None:
        await super().wait(passage, size)
        self.most = max(self.most, self.used)


def raw(size: int) -> tuple[bytes, str, str]:
    head = f"Content-Encoding: gzip\r\n{RAW}"
    return gzip.compress(bytes(size), 1), head, "/v2/models/rows/infer"


RAW = "Inference-Header-Content-Length: 0\r\n"
GATED = {
    "gzip": lambda: raw(3_000_000),
    "json": lambda: (oip(200_000), "", "/v2/models/rows/infer"),
    "generate": lambda: (b'{"x":[[%b]]}' % numbers(200_000).encode(), "", "/v2/models/rows/generate"),
    "predict": lambda: (b'{"instances":[[%b]]}' % numbers(200_000).encode(), "", "/v1/models/rows:predict"),
    "json of raw": lambda: (bytes(2_000_000), RAW.replace("0", "%d"), "/v2/models/rows/infer"),
}


@pytest.mark.parametrize("form", sorted(GATED))
def test_large_requests_of_many_clients_take_turns(form: str) -> None:
    body, headers, path = GATED[form]()
    if form == "json of raw":
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(body) // 4], "parameters": {}}
        tensor["parameters"] = {"binary_data_size": len(body)}
        text = json.dumps({"inputs": [tensor]}).encode()
        body, headers = text + body, headers % len(text)
    limit = 8_000_000
    with GatedServer(also={"rows": rows()}) as server:
        gate = server.budget.gate = Watched(limit)
        clients = [server.connect() for _ in range(12)]
        for client in clients:
            client.send(post(body, headers, path))
        answers = [client.read() for client in clients]
        assert [answer.status for answer in answers] == [200] * len(clients)
        assert len({answer.body for answer in answers}) == 1
        assert limit // 4 < gate.most
        # One request alone may exceed the limit; together they would hold far more.
        assert gate.most <= 4 * limit
        assert server.call(lambda: (gate.used, gate.waiting, server.budget.used)) == (0, 0, 0)


def test_large_requests_that_wait_for_their_model_count_and_others_wait_small() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def forward(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        begun.release()
        assert go_on.wait(PATIENCE_S)
        return {"y": inputs["x"]}

    size = 3_000_000
    with GatedServer(also={"rows": FakeModel(rows().signature, forward)}) as server:
        gate = server.budget.gate = Watched(4_000_000)
        body, headers, path = raw(size)
        clients = [server.connect() for _ in range(6)]
        for client in clients:
            client.send(post(body, headers, path))
        assert begun.acquire(timeout=PATIENCE_S)
        while server.call(lambda: gate.waiting) < 5:
            pass
        assert server.call(lambda: server.budget.used) < 4_000_000 + size
        clients[-1].close()
        while server.call(lambda: len(server.connections)) > 5:
            pass
        go_on.set()
        assert [client.read().status for client in clients[:-1]] == [200] * 5
        while server.call(lambda: (gate.used, gate.waiting, server.budget.used)) != (0, 0, 0):
            pass


def test_pipelined_large_requests_do_not_wait_for_one_another(server: GatedServer) -> None:
    body, headers, path = raw(900_000)
    gate = server.budget.gate
    server.budget.gate = Watched(1_000_000)
    try:
        client = server.connect()
        client.send(post(body, headers, path) * 10)
        assert [client.read().status for _ in range(10)] == [200] * 10
        assert server.call(lambda: (server.budget.gate.used, server.budget.used)) == (0, 0)
    finally:
        server.budget.gate = gate


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_large_body_is_received_when_there_is_room_to_decode_it(loop: str, is_chunked: bool) -> None:
    body, path = oip(1_000_000), "/v2/models/rows/infer"
    request = post(body, path=path)
    if is_chunked:
        request = post(b"", "Transfer-Encoding: chunked\r\n", path).replace(b"Content-Length: 0\r\n", b"")
        request += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with GatedServer(loop, {"rows": rows()}) as server:
        gate = server.budget.gate = Watched(5_000_000)
        first = Passage(gate)
        server.call(lambda: first.note(5_000_000))
        clients = [server.connect() for _ in range(4)]
        senders = [threading.Thread(target=client.send, args=(request,)) for client in clients]
        for sender in senders:
            sender.start()
        while server.call(lambda: gate.waiting) < 4:
            pass
        assert server.call(lambda: server.budget.used) < 4 * 2_000_000
        assert server.connect().ask(infer(1)).data == [2, 0]
        server.call(first.leave)
        assert [client.read().body.count(b"1.5") for client in clients] == [1_000_000] * 4
        for sender in senders:
            sender.join()
        assert server.call(lambda: (gate.used, gate.waiting, server.budget.used)) == (0, 0, 0)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_leaves_while_its_body_is_not_received_is_noticed(loop: str) -> None:
    with GatedServer(loop, {"rows": rows()}) as server:
        gate = server.budget.gate = Watched(1_000_000)
        first = Passage(gate)
        server.call(lambda: first.note(5_000_000))
        client, closing = server.connect(), server.connect()
        head = b"POST /v2/models/rows/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n"
        client.send(head + b"[" * 1000)
        closing.send(head)
        while server.call(lambda: gate.waiting) < 2:
            pass
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        while server.call(lambda: len(server.connections)) > 1:
            server.pass_time(0.1)
        closing.close()
        server.call(first.leave)
        while server.call(lambda: (len(server.connections), gate.used, gate.waiting, server.budget.used)) != (
            0,
            0,
            0,
            0,
        ):
            pass


def test_a_stream_of_large_events_holds_nothing_between_them(server: GatedServer) -> None:
    client = server.connect()
    answer = client.ask(post(b'{"x":1.5}', path="/v2/models/wide/generate_stream"))
    assert answer.body.count(b"1.5") == 50_000
    assert server.call(lambda: (server.budget.gate.used, server.budget.used)) == (0, 0)


# Clients that do not read


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_never_reads_gets_few_answers(loop: str) -> None:
    model = widen(500_000)
    ask = post(b'{"x":1.5,"binary":0}', path="/v2/models/wide/generate")
    with GatedServer(loop, {"wide": model}, max_unsent_bytes=4_000_000) as server:
        attackers = [server.connect() for _ in range(4)]
        for attacker in attackers:
            attacker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            attacker.send(ask * 512)
        innocent = server.connect()
        seen = -1
        while seen != (seen := server.call(lambda: server.budget.used)) or not seen:
            assert innocent.ask(infer(1)).data == [2, 0]
        # One response of 2 MB for each, or two with the first one of the next window.
        assert server.call(lambda: server.budget.used) <= 4 * 4_000_000
        assert len(model.calls) <= 4 * 4
        for attacker in attackers:
            attacker.close()
        while server.call(lambda: server.budget.used):
            assert innocent.ask(infer(1)).data == [2, 0]


def test_answers_of_another_size_than_the_first_are_bounded() -> None:
    with GatedServer(also={"wide": widen(100_000)}, max_unsent_bytes=100_000) as server:
        client = server.connect()
        assert client.ask(get("/v2/health/live")).status == 200
        server.gate.clear()
        client.send(infer(1) + post(b'{"x":1.5}', path="/v2/models/wide/generate") * 60)
        while server.call(lambda: len(server.connections)):
            pass
        assert server.call(lambda: server.budget.used) == 0


def test_a_client_that_reads_gets_all_answers() -> None:
    ask = post(b'{"x":1.5}', path="/v2/models/wide/generate")
    with GatedServer(also={"wide": widen(30_000)}, max_unsent_bytes=100_000, max_bytes=1_000_000) as server:
        client = server.connect()
        sender = threading.Thread(target=client.send, args=(ask * 200,))
        sender.start()
        assert all(client.read().body.count(b"1.5") == 30_000 for _ in range(200))
        sender.join()
        assert server.call(lambda: server.budget.used) == 0


# Slow clients


def test_slow_heads_are_bounded_in_size_and_time() -> None:
    with GatedServer(max_header_bytes=60_000, request_timeout_s=5) as server:
        slow = [server.connect() for _ in range(3)]
        for client in slow:
            client.send(b"POST /v2/models/m/infer HTTP/1.1\r\nA: ")
            client.send(b"x" * 30_000)
        while server.call(lambda: server.budget.used) < 3 * 30_000:
            pass
        server.pass_time(3)
        for client in slow:
            client.send(b"x")
        assert server.connect().ask(infer(1)).data == [2, 0]
        server.pass_time(3)
        assert [client.read().status for client in slow] == [408] * 3
        assert server.call(lambda: server.budget.used) == 0
