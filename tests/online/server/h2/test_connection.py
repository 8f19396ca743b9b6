"""gRPC over the server's HTTP/2 with real clients, and the reasons that end a connection: time limits, faults, draining."""

import asyncio
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

import real
from conformance.grpc import GrpcConformance
from h2_servers import (
    BREAK,
    CHAT,
    DECODE,
    ECHO,
    FAIL,
    FLOOD,
    FLOOD_BYTES,
    HOLD,
    PATIENCE_S,
    STALL,
    GrpcServer,
    Peer,
    data_frame,
    message,
)
from http_servers import LOOPS
from penstock.clock import SystemClock
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.online.server.network.tls import make_context
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


class Transport:
    """A listener with the server's HTTP/2, for the conformance suite."""

    def __init__(self, service: GrpcService, config: ServerConfig) -> None:
        connections = Connections(config.max_connections)
        shared = H2Context(service.methods, config, connections, SystemClock())
        self._service = service
        self._listener = Listener(connections, config, SystemClock())
        self._endpoint = Endpoint(host="127.0.0.1", tls=make_context(config), http2=lambda: H2Connection(shared))

    async def start(self) -> tuple[str, int]:
        return await self._listener.listen(self._endpoint)

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        self._service.announce_health()
        draining = asyncio.ensure_future(self._listener.drain(grace_s, timeout_s))
        await asyncio.sleep(grace_s)
        self._service.drain()
        await draining

    async def stop(self) -> None:
        self._listener.stop()


class TestConformance(GrpcConformance):
    make = staticmethod(Transport)


@pytest.fixture(params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GrpcServer]:
    with GrpcServer(request.param, request_timeout_s=10, idle_timeout_s=30) as server:
        yield server


@pytest.fixture
def channel(server: GrpcServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target, UNLIMITED) as channel:
        yield channel


def status(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, error.details()


def test_grpcio_unary(server: GrpcServer, channel: grpc.Channel) -> None:
    echo = channel.unary_unary(ECHO)
    for size in (0, 1, 70_000, 20_000_000):
        assert echo(b"x" * size) == b"x" * size
    compressed = echo(b"y" * 100_000, compression=grpc.Compression.Gzip, metadata=[("a", "b"), ("k-bin", b"\0\1")])
    assert compressed == b"y" * 100_000
    assert server.metadata.items() >= {"a": "b", "k-bin": b"\0\1"}.items()
    assert echo(b"z" * 1000, compression=grpc.Compression.Deflate, timeout=PATIENCE_S) == b"z" * 1000
    assert status(lambda: channel.unary_unary(FAIL)("näh: 100 %\n".encode())) == ("NOT_FOUND", "näh: 100 %\n")
    assert status(lambda: channel.unary_unary(BREAK)(b"")) == ("INTERNAL", "internal error")
    assert status(lambda: channel.unary_unary("/a/B")(b"")) == ("UNIMPLEMENTED", "there is no method '/a/B'")
    many = [echo.future(str(n).encode()) for n in range(500)]
    assert [each.result(PATIENCE_S) for each in many] == [str(n).encode() for n in range(500)]


def test_grpcio_streams(channel: grpc.Channel) -> None:
    chat = channel.stream_stream(CHAT)
    sizes = (0, 1, 100_000, 0, 5_000_000)
    assert [len(each) for each in chat(bytes(size) for size in sizes)] == list(sizes)
    assert list(chat(iter(()))) == []
    flood = channel.unary_stream(FLOOD)
    assert [int.from_bytes(each[:4], "big") for each in flood(b"100")] == list(range(100))
    assert status(lambda: list(chat(iter([b"fail"])))) == ("NOT_FOUND", "no such thing")


def test_grpcio_cancels_and_times_out(server: GrpcServer, channel: grpc.Channel) -> None:
    assert status(lambda: channel.unary_unary(HOLD)(b"", timeout=0.05))[0] == "DEADLINE_EXCEEDED"
    assert server.cancelled.acquire(timeout=PATIENCE_S)
    calls = [channel.unary_unary(HOLD).future(b""), channel.stream_stream(STALL)(iter([b"x"]))]
    for _ in range(3):
        assert server.entered.acquire(timeout=PATIENCE_S)
    for call in calls:
        call.cancel()
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_grpcio_keeps_alive(server: GrpcServer) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(server.target, [*options, *UNLIMITED]) as channel:
        held = channel.unary_unary(HOLD).future(b"")
        assert server.entered.acquire(timeout=PATIENCE_S)
        assert channel.unary_unary(ECHO)(b"a") == b"a"
        server.call(lambda: (server.held[0].send(b"done"), server.held[0].finish()))
        assert held.result(PATIENCE_S) == b"done"


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_tls(loop: str) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with GrpcServer(loop, tls=context) as server:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(f"localhost:{server.address[1]}", credentials, UNLIMITED) as channel:
            assert channel.unary_unary(ECHO)(b"x" * 3_000_000) == b"x" * 3_000_000
            assert len(list(channel.unary_stream(FLOOD)(b"50"))) == 50


@pytest.mark.real
def test_curl(server: GrpcServer, tmp_path: Path) -> None:
    (tmp_path / "message").write_bytes(message(b"hello"))
    answer = real.run(
        "curl", "-sS", "--http2-prior-knowledge", "-D", "-", "-H", "content-type: application/grpc", "-H", "te: trailers",
        "--data-binary", f"@{tmp_path / 'message'}", f"http://{server.target}{ECHO}",
    ).stdout  # fmt: skip
    assert answer.startswith(b"HTTP/2 200")
    assert message(b"hello") in answer
    plain = real.run("curl", "-sS", "--http2-prior-knowledge", "-D", "-", f"http://{server.target}/v2/models/m").stdout
    assert plain.startswith(b"HTTP/2 415")
    assert b"with 'curl --http1.1'" in plain
    head = real.run("curl", "-sS", "--http2-prior-knowledge", "-I", f"http://{server.target}/v2/models/m").stdout
    assert head.startswith(b"HTTP/2 415")


@pytest.mark.real
def test_nghttp_and_h2load(server: GrpcServer, tmp_path: Path) -> None:
    data = tmp_path / "message"
    data.write_bytes(message(bytes(200_000)))
    url, kind = f"http://{server.target}{ECHO}", "content-type:application/grpc"
    for options in ([], ["--padding=200"], ["--window-bits=10"], ["--continuation"], ["--header-table-size=0"]):
        answer = real.run("nghttp", "-nv", "-H", kind, "-d", data, *options, url).stdout.decode()
        assert "grpc-status: 0" in answer
        assert "error_code=NO_ERROR" in answer
    load = ["-n", "3000", "-c", "3", "-m", "50", "-d", data, "-H", kind, url]
    assert b"3000 succeeded, 0 failed" in real.run("h2load", *load).stdout


def test_what_is_not_http2(server: GrpcServer) -> None:
    with Peer(server.address) as peer:
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.goaway()[1] == ErrorCode.PROTOCOL_ERROR
        assert peer.is_closed
    with Peer(server.address) as peer:
        peer.greet()
        peer.send(h2.ping(bytes(8)))
    with Peer(server.address) as peer:
        peer.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", h2.ping(bytes(8)))
        assert peer.goaway()[2] == "the first frame is not SETTINGS"


def test_clients_that_are_slow_to_ask(server: GrpcServer) -> None:
    slow = [Peer(server.address) for _ in range(3)]
    slow[0].send(b"PRI * HT")
    slow[1].greet()
    slow[1].send(h2.frame(h2.HEADERS, 0, 1, b"\x83"))
    slow[2].greet()
    slow[2].send(h2.ping(bytes(8))[:-1])
    half, stream = server.connect(), server.connect()
    half.send(half.headers(1), data_frame(1, message(b"hello")[:7]))
    stream.send(stream.headers(1, CHAT), stream.headers(3, CHAT), data_frame(3, message(b"hello")[:7]))
    for peer in (half, stream):
        peer.send(h2.ping(bytes(8)))
        next(peer.frames(h2.PING))
    server.until(lambda: len(server.connections) == 5)
    server.pass_time(9)
    slow[1].send(h2.frame(h2.CONTINUATION, 0, 1, b"\x86"))
    server.pass_time(2)
    for peer in slow:
        assert peer.goaway()[1] == ErrorCode.ENHANCE_YOUR_CALM
        assert peer.is_closed
        peer.socket.close()
    assert (half.answer(1).status, stream.answer(3).status) == (4, 4)
    # A stream may be silent for any time.
    stream.send(data_frame(1, message(b"still here"), h2.END_STREAM))
    assert stream.answer(1).messages == [b"still here"]


def test_clients_that_ask_nothing(server: GrpcServer) -> None:
    idle, busy = server.connect(), server.connect()
    busy.send(busy.request(1, path=HOLD))
    assert server.entered.acquire(timeout=PATIENCE_S)
    assert idle.ask(1).status == 0
    server.pass_time(31)
    assert idle.goaway()[:2] == (1, ErrorCode.NO_ERROR)
    assert idle.is_closed
    # The server sends PING to a client that waits for a slow response.
    assert next(busy.frames(h2.PING)).payload == b"penstock"
    busy.send(h2.ping(b"penstock", h2.ACK), h2.ping(bytes(8)))
    next(busy.frames(h2.PING))
    server.pass_time(29)
    server.call(lambda: (server.held[0].send(b"done"), server.held[0].finish()))
    assert busy.answer(1).messages == [b"done"]


def test_clients_that_are_gone_without_a_word(server: GrpcServer) -> None:
    peer = server.connect()
    peer.send(peer.request(1, path=HOLD))
    assert server.entered.acquire(timeout=PATIENCE_S)
    server.pass_time(31)
    server.pass_time(31)
    assert server.cancelled.acquire(timeout=PATIENCE_S)
    assert peer.is_closed


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_leaves_while_nothing_is_read_from_it_is_noticed(loop: str) -> None:
    with GrpcServer(loop) as server, Peer(server.address) as peer:
        peer.greet()
        peer.send(*(peer.request(2 * n + 1, b"x", DECODE) for n in range(100)))
        assert server.entered.acquire(timeout=PATIENCE_S)
        server.until(lambda: next(iter(server.connections._open))._is_paused)
        peer.__exit__()
        while server.call(lambda: len(server.connections)):
            server.pass_time(0.1)
        assert server.cancelled.acquire(timeout=PATIENCE_S)


def test_clients_that_read_too_little(server: GrpcServer) -> None:
    peer = server.connect(initial_window_size=10)
    peer.send(peer.request(1, b"1", FLOOD), peer.request(3, path=HOLD))
    assert server.entered.acquire(timeout=PATIENCE_S)
    server.pass_time(20)
    peer.send(h2.window_update(1, 10), h2.ping(bytes(8)))
    next(peer.frames(h2.PING))
    server.pass_time(11)
    assert peer.reset(1) == ErrorCode.CANCEL
    server.call(lambda: (server.held[0].send(b"d"), server.held[0].finish()))
    assert peer.answer(3).messages == [b"d"]


def test_too_many_connections() -> None:
    with GrpcServer(max_connections=1) as server:
        first = server.connect()
        first.send(first.request(1, path=HOLD))
        assert server.entered.acquire(timeout=PATIENCE_S)
        second = server.connect()
        assert second.goaway()[1:] == (ErrorCode.ENHANCE_YOUR_CALM, "too many connections")
        assert second.is_closed
        server.call(lambda: (server.held[0].send(b"d"), server.held[0].finish()))
        assert first.answer(1).status == 0


def test_an_idle_connection_makes_room() -> None:
    with GrpcServer(max_connections=1) as server:
        first = server.connect()
        assert first.ask(1).status == 0
        second = server.connect()
        assert second.ask(1).status == 0
        assert first.goaway()[1] == ErrorCode.NO_ERROR
        assert first.is_closed


def test_draining(server: GrpcServer) -> None:
    busy, idle, asking = (server.connect() for _ in range(3))
    busy.send(busy.request(1, path=HOLD))
    assert server.entered.acquire(timeout=PATIENCE_S)
    assert idle.ask(1).status == 0
    asking.send(asking.headers(1))
    draining = asyncio.run_coroutine_threadsafe(server.listener.drain(0, PATIENCE_S), server.loop)
    for peer in (busy, idle, asking):
        # The first GOAWAY only announces the end, so that requests on their way are still accepted.
        assert peer.goaway()[:2] == (h2.MAX_STREAM_ID, ErrorCode.NO_ERROR)
    assert busy.ask(3).messages == [b"hello"]
    assert (busy.goaway()[0], idle.goaway()[0], asking.goaway()[0]) == (3, 1, 1)
    assert idle.is_closed
    busy.send(busy.request(5))  # after the final GOAWAY, so the client must send this request elsewhere
    asking.send(data_frame(1, message(b"late"), h2.END_STREAM))
    assert asking.answer(1).messages == [b"late"]
    server.call(lambda: (server.held[0].send(b"done"), server.held[0].finish()))
    assert busy.answer(1).messages == [b"done"]
    for peer in (busy, asking):
        assert peer.is_closed
    draining.result(PATIENCE_S)


def test_grpcio_loses_nothing_to_draining(server: GrpcServer, channel: grpc.Channel) -> None:
    held = channel.unary_unary(HOLD).future(b"")
    assert server.entered.acquire(timeout=PATIENCE_S)
    flood = channel.unary_stream(FLOOD)(b"100")
    next(flood)
    draining = asyncio.run_coroutine_threadsafe(server.listener.drain(0, PATIENCE_S), server.loop)
    server.until(lambda: server.connections.leaving)
    server.call(lambda: (server.held[0].send(b"done"), server.held[0].finish()))
    assert held.result(PATIENCE_S) == b"done"
    assert sum(map(len, flood)) == 99 * FLOOD_BYTES
    draining.result(PATIENCE_S)


def test_memory_of_a_connection_without_calls(server: GrpcServer) -> None:
    """Thousands of calls leave no objects behind."""
    peer = server.connect()
    for n in range(2000):
        peer.send(peer.request(2 * n + 1, struct.pack(">I", n)))
    assert peer.answer(3999).status == 0
    connection: Any = next(iter(server.connections._open))
    assert connection._session.streams == {}
    assert len(connection._session._closed) <= 1024
    assert connection._outbox._frames == []


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_is_gone_when_it_is_refused_is_no_error(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    with GrpcServer(loop) as server:
        with server.connect() as gone:
            assert gone.ask(1).status == 0  # nothing is left unread, which would reset the connection

            def leave() -> None:
                gone.send(h2.frame(h2.PUSH_PROMISE, 0, 1))
                gone.__exit__()

            server.call(leave)  # the server is busy meanwhile, and cannot notice
        assert server.connect().ask(1).status == 0
    assert not caplog.records
