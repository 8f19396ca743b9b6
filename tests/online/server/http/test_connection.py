"""The HTTP server over plain sockets: its responses, its refusals, and its service to other clients afterwards."""

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest

from http_servers import LOOPS, PATIENCE_S, Client, GatedServer, get, infer, post
from penstock.online.server.network.sniffer import PREFACE
from penstock.testing import double


@pytest.fixture(scope="module", params=sorted(LOOPS))
def shared(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    with GatedServer(request.param, max_request_bytes=100_000) as server:
        yield server


@pytest.fixture
def client(shared: GatedServer) -> Iterator[Client]:
    """A client. After the test, the fixture checks that the server still answers other clients."""
    with Client(shared.address) as client:
        yield client
    with Client(shared.address) as other:
        assert other.ask(infer(21)).data == [42, 0]


@pytest.mark.parametrize(
    ("request_bytes", "status", "error"),
    [
        (get("/v2/health/live"), 200, None),
        (get("/v2/health/ready"), 200, None),
        (get("/v2/models/m/ready"), 200, None),
        (get("/v2/models/m/versions/1/ready"), 200, None),
        (get("/v2/models/n/ready"), 400, "Model version not ready"),
        (get("/v2/models/m/versions/2/ready"), 400, "Model version not ready"),
        (get("/v2/models/n"), 404, "Request for unknown model: 'n' is not found"),
        (get("/nothing"), 404, "Not Found"),
        (get("/v2/models/m/infer"), 405, "Method Not Allowed"),
        (get("/v2", method="DELETE"), 405, "Method Not Allowed"),
        (post(b"", path="/v2"), 405, "Method Not Allowed"),
        (post(b"{"), 400, "not an inference request"),
        (infer(name="z"), 400, "unexpected inference input 'z'"),
        (infer(datatype="INT32", data=[1, 2]), 400, "data-type is 'INT32', but model 'm' expects 'FP32'"),
        (infer(shape=[2, 1]), 400, "unexpected shape for input 'x' for model 'm'. Expected [-1, 2], got [2, 1]"),
        (infer(shape=[9, 2], data=[0] * 18), 400, "batch-size must be <= 8 for 'm'"),
        (infer(shape=[1, 1 << 40]), 400, "needs 1099511627776 elements"),
        (infer(headers="Inference-Header-Content-Length: 9999\r\n"), 400, "Content-Length is 9999"),
        (infer(headers="Content-Encoding: gzip\r\n"), 400, "the compressed data is corrupt"),
        (infer(headers="Content-Encoding: br\r\n"), 501, "Content-Encoding"),
        (infer(headers="Content-Encoding: identity\r\n"), 200, None),
        (infer(headers="Upgrade: h2c\r\n"), 200, None),
    ],
)
def test_every_request_has_its_answer_and_the_connection_stays(
    client: Client, request_bytes: bytes, status: int, error: str | None
) -> None:
    answer = client.ask(request_bytes)
    assert answer.status == status
    if error:
        assert error in answer.error
    assert client.ask(infer(3)).data == [6, 0]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/v2", "", 200), ("/v2/models/m/infer", "", 405), ("/v9", "", 404), ("/v2", "Host: two\r\n", 400)],
)
def test_head_is_answered_without_a_body(client: Client, path: str, headers: str, status: int) -> None:
    client.send(get(path, method="HEAD", headers=f"Connection: close\r\n{headers}"))
    received = b"".join(iter(lambda: client.socket.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Content-Length: 0" not in head
    assert body == b""


UPGRADES = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
"""Sent by Java's client with the first request of a connection."""


def chunked(request: bytes, size: int) -> bytes:
    """``request`` with its body in chunks."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked\r\n\r\n"]) + coded + b"0\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_an_offer_to_upgrade_is_ignored(client: Client, piece: int) -> None:
    upgrading = infer(4, UPGRADES)
    requests = [upgrading, get("/v2", headers=UPGRADES), chunked(upgrading, 9), infer(5), upgrading]
    whole = b"".join(requests)
    for start in range(0, len(whole), piece):
        client.send(whole[start : start + piece])
    answers = [client.read() for _ in requests]
    assert [answer.status for answer in answers] == [200] * len(requests)
    assert [answer.data for answer in (answers[0], *answers[2:])] == [[8, 0], [8, 0], [10, 0], [8, 0]]
    assert client.ask(upgrading).data == [8, 0], "whose head is known"


def test_an_offer_to_upgrade_changes_no_other_rule(client: Client) -> None:
    assert client.ask(infer(headers=f"Expect: 100-continue\r\n{UPGRADES}")).status == 100
    assert client.read().data == [2, 0]


@pytest.mark.parametrize(
    "first", ["Content-Length: 0\r\n", "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: x\r\n"]
)
def test_an_offer_to_upgrade_hides_no_contradiction(client: Client, first: str) -> None:
    answer = client.ask(infer(1, UPGRADES + first) + get("/hidden"))
    assert (answer.status, client.is_closed) == (400, True)
    assert "malformed HTTP" in answer.error


@pytest.mark.parametrize("last", ["Connection: close\r\n", "HTTP/1.0"])
def test_the_last_request_may_offer_to_upgrade(client: Client, last: str) -> None:
    request = infer(6, UPGRADES + (last if ":" in last else ""))
    answer = client.ask(request.replace(b"HTTP/1.1", b"HTTP/1.0") if last == "HTTP/1.0" else request)
    assert (answer.data, answer.headers["connection"], client.is_closed) == ([12, 0], "close", True)


def test_metadata(client: Client) -> None:
    assert json.loads(client.ask(get("/v2")).body)["name"] == "penstock"
    assert json.loads(client.ask(get("/v2/models/m")).body) == {
        "name": "m",
        "versions": ["1"],
        "platform": "fake",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }


def test_binary_both_ways(client: Client) -> None:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = json.dumps({"id": "7", "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(text)}\r\n"
    answer = client.ask(post(text + np.float32([1, 2]).tobytes(), length))
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.body[:size])["id"] == "7"
    np.testing.assert_array_equal(np.frombuffer(answer.body[size:], np.float32), [2, 4])
    assert "expecting 1 additional bytes" in client.ask(post(text + bytes(7), length)).error


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        (infer(headers="Inference-Header-Content-Length: -1\r\n"), 400),
        (infer(headers="Inference-Header-Content-Length: 1e3\r\n"), 400),
        (infer(headers=f"A: {'x' * 70_000}\r\n"), 431),
        (infer(headers="A: b\r\n" * 3000), 431),
        (b"POST /v2/models/m/infer HTTP/1.1\r\nA: " + b"x" * 100_000, 431),
        (b"GET /" + b"x" * 100_000, 431),
        (b"CONNECT host:80 HTTP/1.1\r\nHost: x\r\n\r\nhidden", 501),
        (b"\r\n" * 50_000, 431),
        (post(bytes(100_001)), 413),
        (b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999999999999\r\n\r\n", 413),
        (
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"fff\r\n" + bytes(4095) + b"\r\n") * 30,
            413,
        ),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 200_000, 431),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_breaks_the_protocol_or_a_limit_is_told_and_cut_off(client: Client, sent: bytes, status: int) -> None:
    assert client.ask(infer(1)).data == [2, 0]
    refusal = client.ask(sent)
    assert refusal.status == status
    assert refusal.headers["connection"] == "close"
    assert refusal.error
    assert client.is_closed


def test_what_was_asked_before_is_answered_first(client: Client) -> None:
    client.send(infer(1) * 200 + b"nonsense\r\n\r\n")
    assert [client.read().status for _ in range(201)] == [200] * 200 + [400]
    assert client.is_closed


def test_a_large_body_is_refused_before_it_is_sent(client: Client) -> None:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    client.send(head % 1_000_000)
    while (answer := client.read()).status == 100:
        pass
    assert answer.status == 413


def test_expect_continue_keeps_its_place(client: Client) -> None:
    head, _, body = infer(5, "Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    client.send(infer(1) + infer(2) + head + b"\r\n\r\n")
    assert [client.read().data, client.read().data, client.read().status] == [[2, 0], [4, 0], 100]
    assert client.ask(body).data == [10, 0]


def test_a_request_split_at_every_byte(client: Client) -> None:
    whole = infer(4, "Content-Encoding: identity\r\n")
    for cut in range(1, len(whole)):
        client.send(whole[:cut])
        client.send(whole[cut:])
        assert client.read().data == [8, 0]
    for byte in whole:
        client.send(bytes([byte]))
    assert client.read().data == [8, 0]


def test_chunked_bodies(client: Client) -> None:
    body = infer(4).partition(b"\r\n\r\n")[2]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:7], body[7:8], body[8:]))
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert client.ask(head + chunks + b"0\r\nTrailer: x\r\n\r\n").data == [8, 0]
    assert client.ask(infer(1)).data == [2, 0]


def test_pipelined_requests_are_answered_in_order_however_many(client: Client) -> None:
    requests = [get("/v2/health/live") if n % 3 == 0 else infer(n) if n % 3 == 1 else post(b"{") for n in range(600)]
    client.send(b"".join(requests))
    for n in range(600):
        answer = client.read()
        if n % 3 == 1:
            assert answer.data == [2 * n, 0]
        else:
            assert answer.status == (200 if n % 3 == 0 else 400)


def test_connection_close_and_http_1_0(client: Client, shared: GatedServer) -> None:
    answer = client.ask(infer(1, "Connection: close\r\n") + infer(2))
    assert (answer.data, answer.headers["connection"]) == ([2, 0], "close")
    assert client.is_closed
    old = shared.connect()
    for _ in range(2):
        answer = old.ask(infer(1, "Connection: keep-alive\r\n", version="1.0"))
        assert answer.headers["connection"] == "keep-alive"
    assert old.ask(infer(1, version="1.0")).headers["connection"] == "close"
    assert old.is_closed


def test_a_client_that_half_closes_gets_its_answers(client: Client) -> None:
    client.send(infer(1) + infer(2))
    client.socket.shutdown(1)
    assert [client.read_final().data, client.read_final().data] == [[2, 0], [4, 0]]
    assert client.is_closed


def test_truncated_bodies_and_clients_that_leave(shared: GatedServer, client: Client) -> None:
    client.send(infer(1)[:-5])
    client.socket.shutdown(1)
    assert client.is_closed


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_leaves_before_its_answer_harms_nobody(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        leaver, stayer = server.connect(), server.connect()
        leaver.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        stayer.send(infer(2))
        leaver.close()
        server.gate.set()
        assert stayer.read().data == [4, 0]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_what_arrives_while_the_model_runs_leaves_as_one_batch(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        clients = [server.connect() for _ in range(6)]
        clients[0].send(infer(0))
        assert server.entered.acquire(timeout=PATIENCE_S)
        for n, client in enumerate(clients[1:], 1):
            client.send(infer(n))
            # One event-loop iteration for each. The response proves that all of them have been received.
            assert server.connect().ask(get("/v2/health/live")).status == 200
        server.gate.set()
        assert [client.read().data[0] for client in clients] == [0, 2, 4, 6, 8, 10]
        assert [len(call["x"]) for call in server.model.calls] == [1, 5]


def test_a_full_queue_answers_at_once() -> None:
    with GatedServer(max_queue=1) as server:
        server.gate.clear()
        first, second = server.connect(), server.connect()
        first.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        refused = second.ask(infer(2))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        server.gate.set()
        assert first.read().data == [2, 0]
        assert second.ask(infer(2)).data == [4, 0]


def test_too_many_busy_connections_are_refused() -> None:
    with GatedServer(max_connections=1) as server:
        server.gate.clear()
        first = server.connect()
        first.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        refused = server.connect()
        answer = refused.read()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert refused.is_closed
        server.gate.set()
        assert first.read().status == 200


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_idle_connections_at_the_limit_make_room(loop: str) -> None:
    with GatedServer(loop, max_connections=4) as server:
        idle = [server.connect() for _ in range(4)]
        assert idle[0].ask(infer(1)).status == 200
        server.gate.clear()
        idle[1].send(infer(2))
        assert server.entered.acquire(timeout=PATIENCE_S)
        for _ in range(20):
            assert server.connect().ask(get("/v2/health/live")).status == 200
        assert idle[0].is_closed
        assert idle[2].is_closed
        server.gate.set()
        assert idle[1].read().data == [4, 0]


_PARTS = ["part of a head", "part of a body", "part of a preface", "a preface", "nothing"]


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("data", [infer(1)[:40], infer(1)[:-1], PREFACE[:10], PREFACE, b""], ids=_PARTS)
def test_clients_without_a_complete_request_lock_out_no_others(loop: str, data: bytes) -> None:
    with GatedServer(loop, max_connections=8) as server:
        known = server.connect()
        assert known.ask(infer(1)).status == 200
        strangers = []
        for _ in range(40):
            # The answer shows that the loop has gone round, so that the connections do not arrive in one burst.
            strangers.append(server.connect())
            assert known.ask(infer(2)).status == 200
        for stranger in strangers:
            stranger.send(data)
            assert known.ask(infer(2)).status == 200
            assert server.connect().ask(infer(3)).data == [6, 0]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_slow_and_idle_clients_are_cut_off_and_waiting_ones_are_not(loop: str) -> None:
    with GatedServer(loop, request_timeout_s=10, idle_timeout_s=30) as server:
        server.gate.clear()
        slow, idle, waiting = server.connect(), server.connect(), server.connect()
        waiting.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        slow.send(infer(1)[:40])
        assert idle.ask(get("/v2/health/live")).status == 200
        server.pass_time(9)
        slow.send(b"x")
        assert idle.ask(get("/v2/health/live")).status == 200
        server.pass_time(2)
        assert slow.read().status == 408
        server.pass_time(31)
        assert idle.is_closed
        server.gate.set()
        assert waiting.read().data == [2, 0]


def test_a_client_that_reads_nothing_is_not_read_from_and_cut_off() -> None:
    with GatedServer(idle_timeout_s=30) as server:
        client = server.connect()
        client.socket.setblocking(False)
        metadata = get("/v2/models/m") * 100
        with pytest.raises(BlockingIOError):  # noqa: PT012 - which send fills the buffers depends on the system
            while True:
                client.socket.send(metadata)
        server.pass_time(29)
        # Bytes that the operating system can buffer count as progress.
        while server.call(lambda: len(server.connections)):
            server.pass_time(31)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_draining_answers_what_is_in_flight_and_closes(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        busy, idle, sending, pipelined = (server.connect() for _ in range(4))
        assert idle.ask(get("/v2/health/live")).status == 200
        whole = infer(3)
        sending.send(whole[:-10])
        pipelined.send(infer(4) + infer(5))
        busy.send(infer(2))
        assert server.entered.acquire(timeout=PATIENCE_S)
        assert idle.ask(get("/v2/health/live")).status == 200
        draining = asyncio.run_coroutine_threadsafe(server.listener.drain(0, PATIENCE_S), server.loop)
        assert idle.is_closed
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        sending.send(whole[-10:])
        server.gate.set()
        answers = [busy.read(), sending.read(), pipelined.read(), pipelined.read()]
        assert [answer.data[0] for answer in answers] == [4, 6, 8, 10]
        assert [answer.headers.get("connection") for answer in answers] == ["close", "close", None, "close"]
        draining.result(PATIENCE_S)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_what_is_on_its_way_when_the_listener_closes_is_answered(loop: str) -> None:
    with GatedServer(loop) as server:
        used, fresh = server.connect(), server.connect()
        assert used.ask(infer(1)).data == [2, 0]
        draining = asyncio.run_coroutine_threadsafe(server.listener.drain(0, 4 * PATIENCE_S), server.loop)
        while server.call(lambda: server.listener.is_serving):
            pass
        for client in (used, fresh):
            client.send(infer(3))
        for client in (used, fresh):
            answer = client.read()
            assert (answer.data, answer.headers["connection"]) == ([6, 0], "close")
            assert client.is_closed
        draining.result(PATIENCE_S)


def test_draining_ends_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    with GatedServer() as server:
        server.gate.clear()
        client = server.connect()
        client.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        asyncio.run_coroutine_threadsafe(server.listener.drain(0, 0), server.loop).result(PATIENCE_S)
        assert client.is_closed
    assert "1 connections were aborted" in caplog.text


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_an_answer_in_flight_survives_garbage_and_a_half_close(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        client = server.connect()
        client.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        client.send(b"nonsense\r\n\r\n")
        client.socket.shutdown(1)
        # The response to another client proves that both have been received.
        assert server.connect().ask(get("/v2/health/live")).status == 200
        server.gate.set()
        assert client.read_final().data == [2, 0]
        assert client.read_final().status == 400
        assert client.is_closed


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_draining_closes_where_a_later_request_was_answered_first(loop: str) -> None:
    with GatedServer(loop) as server:
        server.gate.clear()
        client = server.connect()
        client.send(infer(1) + get("/v2/health/live"))
        assert server.entered.acquire(timeout=PATIENCE_S)
        assert server.connect().ask(get("/v2/health/live")).status == 200
        draining = asyncio.run_coroutine_threadsafe(server.listener.drain(0, 4 * PATIENCE_S), server.loop)
        while server.call(lambda: server.listener.is_serving):
            pass
        server.gate.set()
        assert client.read().data == [2, 0]
        assert client.read().status == 200
        assert client.is_closed
        draining.result(PATIENCE_S)


def test_trailers_are_no_headers(client: Client) -> None:
    body = infer(4).partition(b"\r\n\r\n")[2]
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    for trailers in (b"Content-Encoding: gzip\r\n", b"Content-Encoding: gzip\r\nA: b\r\n", b"Expect: 100-continue\r\n"):
        assert client.ask(head + chunks + trailers + b"\r\n").data == [8, 0]
        assert client.ask(infer(1)).data == [2, 0]
    trailer = b"Inference-Header-Content-Length: 3\r\nA: b\r\n"
    assert client.ask(head + chunks + trailer + b"\r\n").data == [8, 0]
    assert client.ask(infer(1)).data == [2, 0]


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("host", ["localhost", ""])
def test_a_free_port_is_one_port_whatever_addresses_a_name_has(loop: str, host: str) -> None:
    with GatedServer(loop, host=host) as server:
        assert {socket.getsockname()[1] for socket in server.listener._servers[0][0].sockets} == {server.address[1]}
        assert server.connect().ask(infer(1)).data == [2, 0]


def test_an_answer_that_cannot_be_encoded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with GatedServer() as server:
        server.model._forward = lambda inputs: {"y": np.full((len(inputs["x"]), 1), "\ud800", object)}
        client = server.connect()
        answer = client.ask(infer(1))
        assert (answer.status, answer.error) == (500, "internal error")
        server.model._forward = double
        assert client.ask(infer(1)).data == [2, 0]
    assert "request failed" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_is_gone_when_it_gets_the_last_answer_is_no_error(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    with GatedServer(loop) as server:
        client, other = server.connect(), server.connect()
        assert (client.ask(infer()).status, other.ask(infer()).status) == (200, 200)

        def leave() -> None:
            server.listener.announce_end()
            client.send(get("/v2/health/live"))
            client.close()

        server.call(leave)  # the server is busy meanwhile, and cannot notice
        assert other.ask(infer()).status == 200
    assert not caplog.records


def test_readiness_is_that_of_the_data_plane() -> None:
    with GatedServer() as server:
        client = server.connect()
        assert client.ask(get("/v2/health/ready")).status == 200
        server.call(server.dataplane.close)
        assert client.ask(get("/v2/health/ready")).status == 400
        assert client.ask(get("/v2/health/live")).status == 200
