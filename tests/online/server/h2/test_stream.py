"""Calls over HTTP/2: messages, the end of a call, and backpressure on streams."""

import gzip
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from h2_servers import (
    CHAT,
    ECHO,
    HOLD,
    KEYED,
    KEYED_BYTES,
    KEYED_CHAT,
    OPEN_BYTES,
    PATIENCE_S,
    STALL,
    GrpcServer,
    Peer,
    data_frame,
    message,
)
from penstock.online.server.access.gate import LIMIT_BYTES
from penstock.online.server.h2.guard import BURST
from penstock.online.server.h2.session import STREAM_WINDOW
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode


@pytest.fixture(scope="module")
def shared() -> Iterator[GrpcServer]:
    with GrpcServer(max_request_bytes=100_000) as server:
        yield server


@pytest.fixture
def server(shared: GrpcServer) -> GrpcServer:
    shared.held.clear()
    for count in (shared.entered, shared.cancelled):
        while count.acquire(blocking=False):
            pass
    return shared


@pytest.fixture
def peer(server: GrpcServer) -> Peer:
    return server.connect()


def test_a_stream_answers_message_by_message(peer: Peer) -> None:
    peer.send(peer.headers(1, CHAT))
    for text in (b"one", b"", b"x" * 50_000):
        peer.send(data_frame(1, message(text)))
        received = b""
        while len(received) < len(text) + 5:
            received += next(peer.frames(h2.DATA)).payload
        assert received == message(text)
    peer.send(data_frame(1, message(b"two") + message(b"three"), h2.END_STREAM))
    answer = peer.answer(1)
    assert (answer.messages, answer.status) == ([b"two", b"three"], 0)


def test_a_paused_stream_keeps_what_its_window_allows_and_goes_on(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.headers(1, CHAT), data_frame(1, message(b"pause") + message(b"later") + message(b"")))
    assert server.entered.acquire(timeout=PATIENCE_S)
    peer.send(data_frame(1, message(b"last"), h2.END_STREAM), peer.request(3))
    assert peer.answer(3).messages == [b"hello"]
    server.call(server.held[0].resume)
    assert peer.answer(1).messages == [b"later", b"", b"last"]


def test_a_paused_stream_is_given_no_window(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.headers(1, CHAT), data_frame(1, message(b"pause")))
    assert server.entered.acquire(timeout=PATIENCE_S)
    filler = message(bytes(90_000))
    for _ in range(STREAM_WINDOW // len(filler)):
        peer.send(data_frame(1, filler))
    peer.send(peer.request(3))
    seen = []
    while not seen or seen[-1].stream_id != 3:
        seen.append(peer.frame())
    assert [each for each in seen if each.stream_id == 1] == []
    server.call(server.held[0].resume)
    updates = peer.frames(h2.WINDOW_UPDATE)
    assert next(each.stream_id for each in updates if each.stream_id) == 1


def test_pausing_within_pausing(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.headers(1, CHAT), data_frame(1, message(b"pause") * 3 + message(b"end"), h2.END_STREAM))
    for _ in range(3):
        assert server.entered.acquire(timeout=PATIENCE_S)
        server.call(server.held[-1].resume)
    assert peer.answer(1).messages == [b"end"]


@pytest.mark.parametrize(
    ("path", "sent", "status", "error"),
    [
        (ECHO, b"", 12, "no complete message"),
        (ECHO, message(b"abc")[:-1], 12, "no complete message"),
        (ECHO, message(b"a") + message(b"b"), 12, "the client sent several"),
        (ECHO, message(b"a") + b"\0", 12, "no complete message"),
        (ECHO, message(b"abc", 1), 13, "no grpc-encoding"),
        (CHAT, message(b"abc")[:-1], 13, "ends within a message"),
        (CHAT, message(b"abc", 1), 13, "no grpc-encoding"),
        (CHAT, message(b"fail"), 5, "no such thing"),
        (CHAT, message(b"break"), 13, "internal error"),
        (CHAT, struct.pack(">BI", 0, 100_001), 8, "exceeds the limit of 100000"),
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_requests_that_are_none(peer: Peer, path: str, sent: bytes, status: int, error: str, is_split: bool) -> None:
    peer.send(peer.headers(1, path))
    if is_split:
        peer.send(data_frame(1, sent), data_frame(1, b"", h2.END_STREAM))
    else:
        peer.send(data_frame(1, sent, h2.END_STREAM))
    answer = peer.answer(1)
    assert answer.status == status
    assert error in answer.message
    assert peer.ask(3).status == 0


def test_compressed_messages(peer: Peer) -> None:
    packed = message(gzip.compress(b"abc" * 100), 1)
    peer.send(peer.headers(1, grpc_encoding="gzip"), data_frame(1, packed, h2.END_STREAM))
    assert peer.answer(1).messages == [b"abc" * 100]
    peer.send(peer.headers(3, CHAT, grpc_encoding="gzip"))
    peer.send(data_frame(3, packed + message(b"plain"), h2.END_STREAM))
    assert peer.answer(3).messages == [b"abc" * 100, b"plain"]
    bomb = message(gzip.compress(bytes(100_001)), 1)
    peer.send(peer.headers(5, grpc_encoding="gzip"), data_frame(5, bomb, h2.END_STREAM))
    assert peer.answer(5).status == 8
    answer = peer.ask(7, grpc_encoding="br")
    assert (answer.status, answer.headers["grpc-accept-encoding"]) == (12, "identity,deflate,gzip")


@pytest.mark.parametrize("timeout", ["0n", "1n", "300u", "20m", "00000000H"])
def test_deadlines(peer: Peer, server: GrpcServer, timeout: str) -> None:
    for stream_id, path in ((1, HOLD), (3, STALL)):
        answer = peer.ask(stream_id, path=path, grpc_timeout=timeout)
        assert (answer.status, answer.message) == (4, "the deadline of the call passed")
        assert server.cancelled.acquire(timeout=PATIENCE_S)
    assert peer.ask(5, grpc_timeout="99999999H").status == 0
    assert peer.ask(7, grpc_timeout="soon").status == 3


def test_a_deadline_is_told_to_the_method(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.request(1, path=HOLD, grpc_timeout="90S"), peer.request(3, path=HOLD))
    for _ in range(2):
        assert server.entered.acquire(timeout=PATIENCE_S)
    first, second = server.held
    assert first.deadline is not None
    assert first.deadline.remaining(server.clock) == 90
    assert second.deadline is None
    peer.send(h2.rst_stream(1, ErrorCode.CANCEL), h2.rst_stream(3, ErrorCode.CANCEL))
    for _ in range(2):
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_calls_are_cancelled_once_by_whatever_ends_them(server: GrpcServer) -> None:
    for end in ("reset", "close", "garbage"):
        peer = server.connect()
        peer.send(peer.request(1, path=HOLD), peer.headers(3, STALL), data_frame(3, message(b"x")))
        for _ in range(2):
            assert server.entered.acquire(timeout=PATIENCE_S)
        if end == "reset":
            peer.send(h2.rst_stream(1, ErrorCode.CANCEL), h2.rst_stream(3, ErrorCode.CANCEL))
        elif end == "close":
            peer.socket.shutdown(socket.SHUT_WR)
        else:
            peer.send(h2.window_update(0, 0))
        for _ in range(2):
            assert server.cancelled.acquire(timeout=PATIENCE_S)
        # Further calls of the method have no effect.
        server.call(lambda: [(call.send(b"late"), call.resume(), call.finish()) for call in server.held])
        server.held.clear()
    assert not server.cancelled.acquire(blocking=False)
    assert server.connect().ask(1).status == 0


def test_after_its_end_a_call_says_nothing(peer: Peer, server: GrpcServer) -> None:
    peer.send(peer.request(1, path=HOLD))
    assert server.entered.acquire(timeout=PATIENCE_S)
    call = server.held[0]
    server.call(lambda: (call.send(b"1"), call.finish(), call.send(b"2"), call.finish()))
    assert peer.answer(1).messages == [b"1"]
    assert peer.ask(3).messages == [b"hello"]


def test_metadata(peer: Peer, server: GrpcServer) -> None:
    peer.ask(1, x_text="abc", x_bin="AAE", grpc_timeout="1S")
    assert server.metadata == {"x-text": "abc", "x-bin": b"\0\1"}


class Gate(ThreadPoolExecutor):
    """An executor that starts no work before it is opened."""

    def __init__(self, server: GrpcServer) -> None:
        super().__init__(1)
        self.server = server
        self.opened = threading.Event()
        server.call(lambda: server.loop.set_default_executor(self))

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            assert self.opened.wait(PATIENCE_S)
            return work(*args, **kwargs)

        return super().submit(run)


FIRST_STEP_BYTES = 1 << 16


def zipped(data: bytes) -> bytes:
    return message(gzip.compress(data), 1)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with GrpcServer(max_request_bytes=100_000) as server:
        gate = Gate(server)
        yield gate
        gate.opened.set()


def test_large_compressed_messages_leave_the_event_loop(gate: Gate) -> None:
    server, peer = gate.server, gate.server.connect()
    peer.send(peer.headers(1, grpc_encoding="gzip"), data_frame(1, zipped(bytes(50_000)), h2.END_STREAM))
    peer.send(peer.headers(3, CHAT, grpc_encoding="gzip"))
    peer.send(data_frame(3, message(b"one") + zipped(bytes(5000)) + message(b"three"), h2.END_STREAM))
    # Another call does not wait. Messages before the one that needs decompression are delivered.
    peer.send(peer.request(5))
    seen = []
    while not seen or seen[-1] != (h2.HEADERS, 5, h2.END_HEADERS | h2.END_STREAM):
        frame = peer.frame()
        seen.append((frame.kind, frame.stream_id, frame.flags))
        assert frame.stream_id != 1
    gate.opened.set()
    other = server.connect()
    other.send(other.headers(1, CHAT, grpc_encoding="gzip"))
    other.send(data_frame(1, zipped(bytes(5000)) + zipped(b"") + message(b"x"), h2.END_STREAM))
    assert other.answer(1).messages == [bytes(5000), b"", b"x"]
    server.until(lambda: server.budget.used == 0)


def test_a_message_that_is_being_decompressed_is_counted_and_given_back(gate: Gate) -> None:
    server = gate.server
    packed = zipped(bytes(90_000))
    for path, is_whole in ((HOLD, True), (CHAT, False)):
        peer = server.connect()
        peer.send(peer.headers(1, path, grpc_encoding="gzip"), data_frame(1, packed, h2.END_STREAM if is_whole else 0))
        server.until(lambda: server.budget.used >= FIRST_STEP_BYTES)
        peer.send(h2.rst_stream(1, ErrorCode.CANCEL))
        server.until(lambda: server.budget.used == 0)
    gate.opened.set()
    peer = server.connect()
    peer.send(peer.headers(1, HOLD, grpc_encoding="gzip"), data_frame(1, packed, h2.END_STREAM))
    assert server.entered.acquire(timeout=PATIENCE_S)
    assert 90_000 <= server.call(lambda: server.budget.used) <= 90_000 + len(packed) + OPEN_BYTES
    peer.send(h2.rst_stream(1, ErrorCode.CANCEL))
    server.until(lambda: server.budget.used == 0)


@pytest.mark.parametrize("path", [ECHO, CHAT])
def test_bombs_and_rubbish_end_their_call_alone(peer: Peer, path: str) -> None:
    packed = zipped(bytes(5000))
    for stream_id, sent, status in (
        (1, zipped(bytes(10_000_000)), 8),
        (3, message(bytes(5000), 1), 3),
        (5, message(packed[5:-4], 1), 3),
    ):
        peer.send(peer.headers(stream_id, path, grpc_encoding="gzip"), data_frame(stream_id, sent, h2.END_STREAM))
        assert peer.answer(stream_id).status == status
    assert peer.ask(7).messages == [b"hello"]


@pytest.mark.parametrize("path", [KEYED, KEYED_CHAT])
def test_callers_are_admitted_on_their_headers_alone(peer: Peer, server: GrpcServer, path: str) -> None:
    """The refusal arrives before the client has sent any part of the message."""
    before = server.call(lambda: server.budget.used)
    peer.send(peer.headers(1, path))
    answer = peer.answer(1)
    assert (answer.status, answer.message, answer.headers[":status"]) == (16, "no key", "200")
    peer.send(peer.headers(3, path, x_api_key="busy"))
    answer = peer.answer(3)
    assert (answer.status, answer.headers["grpc-retry-pushback-ms"]) == (8, "1000")
    # Data that the client sends nevertheless is dropped.
    peer.send(data_frame(1, message(bytes(50_000)), h2.END_STREAM))
    assert server.call(lambda: server.budget.used) == before
    assert peer.ask(5, path=KEYED, x_api_key="alice").messages == [b"alice"]


@pytest.mark.parametrize("path", [KEYED, KEYED_CHAT])
def test_a_method_may_take_less_than_the_server(peer: Peer, path: str) -> None:
    peer.send(peer.headers(1, path, x_api_key="alice"), data_frame(1, message(bytes(KEYED_BYTES + 1))[:5]))
    answer = peer.answer(1)
    assert (answer.status, answer.message) == (
        8,
        "a message of 1001 bytes exceeds the limit of 1000 (send less, or raise 'max_request_bytes')",
    )
    sent = zipped(bytes(KEYED_BYTES + 1))
    peer.send(peer.headers(3, path, x_api_key="alice", grpc_encoding="gzip"), data_frame(3, sent, h2.END_STREAM))
    assert peer.answer(3).status == 8
    assert peer.ask(5, bytes(KEYED_BYTES), path=KEYED, x_api_key="alice").status == 0


def test_a_client_that_is_told_to_slow_down_keeps_its_connection(peer: Peer) -> None:
    for stream_id in range(1, 2 * BURST + 100, 2):
        assert peer.ask(stream_id, path=KEYED, x_api_key="busy").status == 8


def test_decompressed_messages_share_the_gate_until_their_answers_are_sent() -> None:
    content = zipped(bytes(5 << 20))
    with GrpcServer(max_request_bytes=8 << 20) as server:
        gate = server.budget.gate
        peers = [server.connect(initial_window_size=0) for _ in range(4)]
        for peer in peers:
            for stream_id in range(1, 9, 2):
                peer.send(peer.headers(stream_id, HOLD, grpc_encoding="gzip"))
                peer.send(data_frame(stream_id, content, h2.END_STREAM))
        for _ in range(4):
            assert server.entered.acquire(timeout=PATIENCE_S)
        server.until(lambda: gate.waiting > 0)
        # The oldest request inside may exceed the limit.
        assert 0 < server.call(lambda: gate.used) <= LIMIT_BYTES + (5 << 20)
        # An unread response still counts.
        server.call(lambda: (server.held[0].send(b"x"), server.held[0].finish()))
        assert server.call(lambda: gate.used) > 0
        for peer in peers:
            peer.send(*(h2.rst_stream(stream_id, ErrorCode.CANCEL) for stream_id in range(1, 9, 2)))
        server.until(lambda: gate.used == gate.waiting == server.budget.used == 0)
