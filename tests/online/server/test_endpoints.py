"""The addresses that a server listens on for given settings, tested over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from h2_servers import Peer
from handles import make_handle
from http_servers import Client, get
from penstock.clock import SystemClock
from penstock.errors import InvalidConfig, Unavailable
from penstock.online.repository.served import ServedModels
from penstock.online.server import endpoints as module
from penstock.online.server.access.admission import Admission, ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.endpoints import Addresses, Endpoints
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.testing import FakeModel

SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"
METADATA = "/inference.GRPCInferenceService/ServerMetadata"
CHECK = "/grpc.health.v1.Health/Check"


@asynccontextmanager
async def made(**settings: Any) -> AsyncIterator[Endpoints]:
    """The endpoints of a server with one model, before they listen."""
    config, clock = ServerConfig(**{"http_port": 0, **settings}), SystemClock()
    repository, shared_memory, tracer = ServedModels(), SharedMemory(enabled=False), Tracer(TraceSettings())
    handle = make_handle(FakeModel())
    handle.start()
    repository.add(handle)
    page = MetricsPage(repository.statistics)
    control = ControlPlane(repository, shared_memory, tracer, LogSettings(), ProcessGroup(), page)
    dataplane = DataPlane(repository, clock, shared_memory, tracer)
    dataplane.open()
    endpoints = Endpoints(
        config,
        clock,
        Connections(config.max_connections),
        dataplane,
        control,
        Admission(Access(None, clock), clock),
        ByteBudget(config.max_inflight_bytes),
    )
    try:
        yield endpoints
    finally:
        endpoints.stop()
        await repository.unload_all()


def serving(ask: Callable[[Addresses], None], **settings: Any) -> None:
    """Listen with ``settings``, and run ``ask`` on another thread."""

    async def run() -> None:
        async with made(**settings) as endpoints:
            await asyncio.to_thread(ask, await endpoints.listen())

    asyncio.run(run())


def of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def status(address: str, path: str = "/v2/health/live") -> int:
    with Client(of(address)) as client:
        return client.ask(get(path)).status


def speaks_grpc(address: str) -> bool:
    with Peer(of(address)) as peer:
        peer.greet()
        try:
            return peer.ask(1, b"", SERVER_LIVE).status == 0
        except (EOFError, ConnectionError):
            return False


def grpc_status(address: str, method: str) -> int:
    with Peer(of(address)) as peer:
        peer.greet()
        return peer.ask(1, b"", method).status


def test_both_protocols_on_both_ports_and_metrics_on_their_own() -> None:
    def ask(found: Addresses) -> None:
        assert len({found.http, found.grpc, found.metrics}) == 3
        for address in (found.http, found.grpc):
            assert status(address) == 200
            assert speaks_grpc(address)
        assert status(found.metrics, "/metrics") == 200
        assert status(found.metrics, "/v2/models/m") == 404
        assert not speaks_grpc(found.metrics)

    serving(ask)


def test_what_is_not_allowed_has_no_port() -> None:
    def without_grpc(found: Addresses) -> None:
        assert (found.grpc, status(found.http), speaks_grpc(found.http)) == ("", 200, False)

    def without_http(found: Addresses) -> None:
        assert (found.http, speaks_grpc(found.grpc)) == ("", True)

    def without_metrics(found: Addresses) -> None:
        assert (found.metrics, status(found.http)) == ("", 200)

    serving(without_grpc, allow_grpc=False)
    serving(without_http, allow_http=False)
    serving(without_metrics, allow_metrics=False)


def test_ports_with_addresses_of_their_own_do_not_speak_for_one_another() -> None:
    def ask(found: Addresses) -> None:
        assert [of(address)[0] for address in (found.http, found.grpc, found.metrics)] == [
            "127.0.0.1",
            "127.0.0.2",
            "127.0.0.3",
        ]
        assert (status(found.http), status(found.metrics, "/metrics")) == (200, 200)
        assert (speaks_grpc(found.http), speaks_grpc(found.grpc)) == (False, True)
        with socket.create_connection(of(found.grpc), timeout=20) as client:
            client.sendall(get("/v2/health/live"))
            assert not client.recv(100).startswith(b"HTTP/")

    serving(ask, grpc_host="127.0.0.2", metrics_host="127.0.0.3")


def test_restricted_methods_are_restricted_on_every_port() -> None:
    def ask(found: Addresses) -> None:
        assert not is_live(found.grpc)
        assert not is_live(found.http)
        assert (status(found.http), status(found.grpc)) == (200, 403), "gRPC's own port is protected from HTTP, too"

    def is_live(address: str) -> bool:
        with Peer(of(address)) as peer:
            peer.greet()
            return bool(peer.ask(1, b"", SERVER_LIVE).status == 0)

    serving(ask, grpc_restricted_protocol=("health:key=value",))


def test_a_restriction_of_http_is_not_evaded_by_grpc_on_its_port() -> None:
    def ask(found: Addresses) -> None:
        assert (status(found.http), status(found.grpc)) == (403, 403)
        with Peer(of(found.http)) as peer:
            peer.greet()
            refused = peer.ask(1, b"", SERVER_LIVE)
            assert (refused.status, refused.message) == (14, "This protocol is restricted, expecting header 'key'")
            assert peer.ask(3, b"", SERVER_LIVE, key="value").status == 0
        with Peer(of(found.grpc)) as peer:
            peer.greet()
            assert peer.ask(1, b"", SERVER_LIVE).status == 0, "nothing restricts gRPC on its own port"

    serving(ask, dialects=(), http_restricted_api=("health:key=value",))


def test_tls_may_be_for_grpc_alone(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2"])

    def ask(found: Addresses) -> None:
        assert (status(found.http), speaks_grpc(found.http)) == (200, False)
        with (
            socket.create_connection(of(found.grpc), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            assert wrapped.selected_alpn_protocol() == "h2"

    serving(ask, tls_certificate=str(tmp_path / "server.pem"), http_tls=False)


def test_a_certificate_without_its_key_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(path)
    with pytest.raises(InvalidConfig, match="no private key was found in .*--tls-key"):
        serving(lambda _: None, tls_certificate=str(path))


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    def ask(found: Addresses) -> None:
        assert found.http.startswith("[::1]:")
        assert status(found.http) == 200

    serving(ask, host="::1")


def test_a_flood_does_not_blind_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_METRICS_CONNECTIONS", 1)

    def ask(found: Addresses) -> None:
        with Client(of(found.http)) as first:
            # A client that has not completed a request would make room for the others.
            assert first.ask(get("/v2")).status == 200
            head = b"Host: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
            first.send(b"POST /v2/repository/index HTTP/1.1\r\n" + head + b"\r\n")
            assert first.read().status == 100
            for address in (found.http, found.grpc):
                assert status(address, "/v2") == 503
                assert [status(address, f"/v2/health/{what}") for what in ("live", "ready")] == [200, 200]
                assert [grpc_status(address, method) for method in (SERVER_LIVE, CHECK, METADATA)] == [0, 0, 14]
            with Client(of(found.http)) as probe:
                answer = probe.ask(get("/v2/health/ready"))
                assert answer.headers["connection"] == "close"
                assert probe.is_closed
            # New clients replace the clients that hold the spare connections.
            held = [socket.create_connection(of(found.http)) for _ in range(200)]
            for number, each in enumerate(held):
                with suppress(OSError):
                    each.sendall(b"POST /v2" if number % 2 else b"PRI *")
            assert [status(found.http), grpc_status(found.grpc, CHECK)] == [200, 0]
            for each in held:
                each.close()
            with Client(of(found.metrics)) as watcher:
                assert watcher.ask(get("/metrics")).status == 200
                assert status(found.metrics, "/metrics") == 200, "an idle connection makes room"
            first.send(b"{}")
            assert first.read().status == 200

    serving(ask, max_connections=1)


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_port_that_is_taken(name: str) -> None:
    expected = pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:.*choose another --{name}-port")
    with socket.create_server(("127.0.0.1", 0)) as taken, expected:
        serving(lambda found: None, **{f"{name}_port": taken.getsockname()[1]})


def test_a_host_that_is_not_here_and_a_socket_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--host must be an address of this machine"):
        serving(lambda found: None, host="192.0.2.1")
    with pytest.raises(Unavailable, match=r"cannot listen on '.*/absent/socket'.*choose another path"):
        serving(lambda found: None, unix_socket=str(tmp_path / "absent" / "socket"))


def test_ports_are_held_for_several_processes_until_all_have_ended() -> None:
    with ExitStack() as held:
        config = Endpoints.reserve(ServerConfig(http_port=0, processes=2, allow_grpc=False), held)
        assert config.port("http") != config.port("metrics")
        assert config.grpc_port is None

        def ask(found: Addresses) -> None:
            assert of(found.http)[1] == config.http_port
            assert status(found.http) == 200
            with pytest.raises(Unavailable, match="choose another --http-port"), ExitStack() as more:
                Endpoints.reserve(ServerConfig(http_port=config.http_port, processes=2), more)

        serving(ask, **{name: getattr(config, name) for name in config.__struct_fields__})
        for port in (config.port("http"), config.port("metrics")):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", config.port("http"))):
        pass


def test_draining_closes_what_is_idle_on_every_port() -> None:
    async def run() -> None:
        async with made() as endpoints:
            found = await endpoints.listen()
            with ExitStack() as stack:
                clients = await asyncio.to_thread(connected, found, stack)
                endpoints.announce_end()
                await endpoints.drain(0, 60)
                assert all(client.is_closed for client in clients)
            for address in (found.http, found.grpc, found.metrics):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(of(address))

    asyncio.run(run())


def test_stopping_ends_all_connections_at_once() -> None:
    async def run() -> None:
        async with made() as endpoints:
            found = await endpoints.listen()
            with ExitStack() as stack:
                clients = await asyncio.to_thread(connected, found, stack)
                endpoints.stop()
                assert await asyncio.to_thread(lambda: all(client.is_closed for client in clients))

    asyncio.run(run())


def connected(found: Addresses, stack: ExitStack) -> list[Client]:
    """Clients of all ports that have received a response and stay connected."""
    clients = [stack.enter_context(Client(of(address))) for address in (found.http, found.grpc, found.metrics)]
    assert [client.ask(get("/v2/health/live")).status for client in clients] == [200, 200, 404]
    return clients
