"""How the server listens and stops: ports, Unix sockets, TLS, connections that are being established."""

import asyncio
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, cast

import pytest
import trustme

from h2_servers import ECHO, PATIENCE_S, GrpcServer, Peer
from http_servers import LOOPS
from penstock.clock import ManualClock
from penstock.online.server.config import ServerConfig
from penstock.online.server.h2 import connection as h2_connection
from penstock.online.server.network.connections import Connections, ServerConnection
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.protocol import h2_frames as h2


class Plain(ServerConnection):
    """Echoes received data in capitals. While draining, it adds a mark and then closes."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.add(self):
            self._transport.write(b"FULL")
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data.upper() + (b" BYE" if self._connections.draining else b""))
        if self._connections.draining:
            self._transport.close()

    def check_time(self, now: float) -> None:
        pass

    def begin_drain(self) -> None:
        pass

    def close_if_idle(self) -> None:
        self._transport.close()

    requests = 0

    def make_room(self) -> bool:
        return False

    def abort(self) -> None:
        self._transport.abort()


class Server:
    """A listener in a thread. Its endpoints use the given protocols: ``Plain`` for HTTP/1.1, and real HTTP/2."""

    def __init__(self, loop: str, **config: Any) -> None:
        self.clock = ManualClock()
        self.config = ServerConfig(**config)
        self._loop_name = loop
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.loop = LOOPS[self._loop_name]()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.connections = Connections(self.config.max_connections)
        self.listener = Listener(self.connections, self.config, self.clock)
        shared = h2_connection.H2Context(GrpcServer().methods(), self.config, self.connections, self.clock)
        self.http = lambda: Plain(self.connections)
        self.http2 = lambda: h2_connection.H2Connection(shared)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self.call(self.listener.stop)
        self.call(lambda: None)  # runs the callbacks that this scheduled
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()

    def listen(self, **options: Any) -> tuple[str, int]:
        spoken = {"http": self.http, "http2": self.http2} if "http" not in options else {}
        if not options.get("unix_socket"):
            options.setdefault("host", "127.0.0.1")
        return self.run(self.listener.listen(Endpoint(**spoken, **options)))

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def start(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return self.run(run())

    def connect(self, address: tuple[str, int]) -> socket.socket:
        if address[1]:
            return self._stack.enter_context(socket.create_connection(address, PATIENCE_S))
        client = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        client.settimeout(PATIENCE_S)
        client.connect(address[0])
        return client


@pytest.fixture(params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param, request_timeout_s=10) as server:
        yield server


def ask(client: socket.socket, data: bytes = b"hello") -> bytes:
    client.sendall(data)
    return client.recv(100)


def call_over(client: socket.socket) -> None:
    """A gRPC call over an open connection."""
    with Peer(client) as peer:
        peer.greet()
        assert peer.ask(1).messages == [b"hello"]


def test_several_endpoints_are_one_server(server: Server, tmp_path: Path) -> None:
    addresses = [server.listen(), server.listen(), server.listen(unix_socket=str(tmp_path / "socket"))]
    assert len(set(addresses)) == 3
    for address in addresses:
        assert ask(server.connect(address)) == b"HELLO"
        call_over(server.connect(address))
    assert server.listener.is_serving


def test_an_endpoint_that_speaks_one_protocol(server: Server) -> None:
    only_http = server.listen(http=server.http)
    assert ask(server.connect(only_http), b"pri * http/2.0") == b"PRI * HTTP/2.0"
    only_http2 = server.listen(http=None, http2=server.http2)
    with Peer(server.connect(only_http2)) as peer:
        peer.send(b"hello")
        assert peer.goaway()[1] == h2.ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("host", ["localhost", ""])
def test_a_free_port_is_one_port_whatever_addresses_a_name_has(server: Server, host: str) -> None:
    _, port = server.listen(host=host)
    assert {each.getsockname()[1] for each in server.listener._servers[0][0].sockets} == {port}
    assert ask(server.connect(("127.0.0.1", port))) == b"HELLO"


def test_a_port_in_use(server: Server) -> None:
    address = server.listen()
    with pytest.raises(OSError, match="in use"):
        server.listen(port=address[1])


def test_a_port_can_be_shared(server: Server) -> None:
    _, port = server.listen(reuse_port=True)
    assert server.listen(reuse_port=True, port=port)[1] == port


def test_a_unix_socket_is_the_owners_and_goes_with_the_server(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    mask = os.umask(0)
    try:
        server.listen(unix_socket=str(path))
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.call(server.listener.stop)
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced_and_a_live_one_is_not(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
        stale.listen()
    assert ask(server.connect(server.listen(unix_socket=str(path)))) == b"HELLO"
    with pytest.raises(OSError, match="in use"):
        server.listen(unix_socket=str(path))
    assert ask(server.connect((str(path), 0))) == b"HELLO"
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(OSError, match="in use"):
        server.listen(unix_socket=str(file))
    assert file.read_text() == "precious"
    path.unlink()
    path.write_text("somebody else's")
    server.call(server.listener.stop)
    assert path.read_text() == "somebody else's"


def context() -> tuple[ssl.SSLContext, Callable[[list[str]], ssl.SSLContext]]:
    """The TLS context of a server, and a factory for those of clients."""
    authority = trustme.CA()
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(made)

    def client(protocols: list[str]) -> ssl.SSLContext:
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        if protocols:
            trusting.set_alpn_protocols(protocols)
        return trusting

    return made, client


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [(["h2", "http/1.1"], "http/1.1"), (["h2"], "h2"), (["http/1.1"], "http/1.1"), ([], None), (["other"], None)],
)
def test_tls_agrees_on_the_protocol(server: Server, offered: list[str], agreed: str | None) -> None:
    ours, client_context = context()
    address = server.listen(tls=ours)
    with client_context(offered).wrap_socket(server.connect(address), server_hostname="localhost") as client:
        assert client.selected_alpn_protocol() == agreed
        if agreed == "h2":
            call_over(client)
        else:
            assert ask(client) == b"HELLO"


def test_tls_without_a_protocol_is_told_by_the_first_bytes(server: Server) -> None:
    ours, client_context = context()
    address = server.listen(tls=ours)
    with client_context([]).wrap_socket(server.connect(address), server_hostname="localhost") as client:
        call_over(client)
    only_http = server.listen(tls=context()[0], http=server.http)
    assert only_http != address


def test_what_is_no_tls_harms_nobody(server: Server) -> None:
    ours, client_context = context()
    address = server.listen(tls=ours)
    intruder = server.connect(address)
    intruder.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with suppress(ConnectionResetError):
        while intruder.recv(100):
            pass
    with client_context([]).wrap_socket(server.connect(address), server_hostname="localhost") as client:
        assert ask(client) == b"HELLO"


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_the_limit_counts_connections_of_all_endpoints(loop: str) -> None:
    with Server(loop, max_connections=2) as server:
        first, second = server.listen(), server.listen()
        silent, talking = server.connect(first), server.connect(second)
        assert ask(silent) == ask(talking) == b"HELLO"
        for address in (first, second):
            refused = server.connect(address)
            assert refused.recv(100) == b"FULL"
            assert refused.recv(100) == b""
        silent.close()
        while len(server.connections) > 1:
            server.call(lambda: None)
        assert ask(server.connect(first)) == b"HELLO"


def test_draining_stops_listening_and_answers_what_is_on_its_way(server: Server, tmp_path: Path) -> None:
    addresses = [server.listen(), server.listen(unix_socket=str(tmp_path / "socket"))]
    used, silent = server.connect(addresses[0]), server.connect(addresses[1])
    assert ask(used) == b"HELLO"
    # The busy loop accepts no connections, so these are still in the sockets' queues when listening ends.
    gate = threading.Event()
    server.loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
    draining = server.start(server.listener.drain(0, 4 * PATIENCE_S))
    waiting = [server.connect(address) for address in addresses for _ in range(20)]
    gate.set()
    while not server.connections.leaving:
        server.call(lambda: None)
    for client in waiting:
        assert ask(client) == b"HELLO BYE"
    assert ask(used) == b"HELLO BYE"
    assert silent.recv(100) == b""
    draining.result(PATIENCE_S)
    assert not server.listener.is_serving
    assert not (tmp_path / "socket").exists()
    for address in addresses:
        with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
            server.connect(address)


def test_late_http2_clients_are_told_to_go_elsewhere(server: Server) -> None:
    address = server.listen()
    early = server.connect(address)
    call_begun = Peer(early)
    call_begun.greet()
    assert call_begun.ask(1, path=ECHO).status == 0
    gate = threading.Event()
    server.loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
    draining = server.start(server.listener.drain(0, 4 * PATIENCE_S))
    with Peer(server.connect(address)) as late:
        late.greet()
        gate.set()
        assert late.goaway()[0] == h2.MAX_STREAM_ID
        assert late.ask(1).messages == [b"hello"]
    assert call_begun.goaway()[0] == h2.MAX_STREAM_ID
    call_begun.__exit__()
    draining.result(PATIENCE_S)


def test_draining_does_not_wait_for_a_tls_handshake(server: Server) -> None:
    address = server.listen(tls=context()[0])
    gate = threading.Event()
    server.loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
    draining = server.start(server.listener.drain(0, 4 * PATIENCE_S))
    server.connect(address)
    gate.set()
    draining.result(PATIENCE_S)


def test_draining_ends_after_its_time(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = server.connect(server.listen())
    with Peer(client) as peer:
        peer.greet()
        peer.send(peer.headers(1))
        peer.send(h2.ping(bytes(8)))
        next(peer.frames(h2.PING))
        server.run(server.listener.drain(0, 0))
        assert peer.is_closed
    assert "1 connections were aborted" in caplog.text


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_the_clock_is_looked_at_without_being_asked(loop: str) -> None:
    """Sweeps run periodically."""
    with Server(loop, request_timeout_s=0.1) as server:
        client = server.connect(server.listen())
        while not len(server.connections):
            server.call(lambda: None)
        server.call(server.listener.sweep)
        server.clock.advance(1)
        assert client.recv(100) == b""


def test_what_was_accepted_in_the_turn_before_is_waited_for(server: Server) -> None:
    """No other client is connected, so the drain has no connection to wait for."""
    address = server.listen()
    gate = threading.Event()
    server.loop.call_soon_threadsafe(gate.wait, PATIENCE_S)
    draining = server.start(server.listener.drain(0, PATIENCE_S))
    client = server.connect(address)
    gate.set()
    assert ask(client) in (b"HELLO", b"HELLO BYE")
    draining.result(PATIENCE_S)
