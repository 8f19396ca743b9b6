"""The addresses on which a server listens, and the protocols of each address. All addresses are started and stopped together."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, get_args

import msgspec

from penstock.clock import Clock
from penstock.errors import Unavailable
from penstock.online.server.access.admission import Admission, ByteBudget
from penstock.online.server.access.table import AccessTable
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.h2 import connection as h2_connection
from penstock.online.server.http import connection as http_connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.resources import make_resources, metrics_resources
from penstock.online.server.network.connections import LAST_REQUEST_S, Connections, SpareConnections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.online.server.network.sniffer import Factory
from penstock.online.server.network.tls import make_context
from penstock.online.server.network.unread import UnreadTotal
from penstock.online.server.processes.supervisor import reserve

_Name = Literal["http", "grpc", "metrics"]

_METRICS_CONNECTIONS = 32
"""Maximum connections to the metrics port. They are not part of ``max_connections``, so that clients cannot block monitoring."""


class Addresses(msgspec.Struct, frozen=True):
    """The addresses on which the server listens. Each is ``host:port``, or empty."""

    http: str = ""
    grpc: str = ""
    metrics: str = ""


class Endpoints:
    """The listeners of one process. Both ports and the Unix socket accept HTTP and gRPC, as the configuration allows.

    Used only on the event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        connections: Connections,
        dataplane: DataPlane,
        control: ControlPlane,
        admission: Admission,
        budget: ByteBudget,
    ) -> None:
        self._config = config
        for_metrics = Connections(_METRICS_CONNECTIONS)
        self._listener = Listener(connections, config, clock)
        self._metrics_listener = Listener(for_metrics, config, clock)
        access = admission.access
        restrictions = config.http_restricted_api, config.grpc_restricted_protocol
        table = partial(AccessTable, access, *restrictions, admission=admission)
        tables = {port: table(port=port) for port in ("http", "grpc", "")}
        spare_tables = {port: table(port=port, is_spare=True) for port in tables}
        connections.spare = spare = SpareConnections()
        self._service = GrpcService(dataplane, control, tables[""], config.max_pipelined, budget)
        resources = make_resources(dataplane, control, access, config)
        # Unix sockets and HTTP/2 need no check of ``Host``. Browsers cannot open Unix sockets. Browsers use HTTP/2 only over TLS,
        # and then compare the name with the certificate.
        any_name = WebAccess(config.allow_origin)
        web = {port: WebAccess.of(config, config.host) if port else any_name for port in tables}
        unread = UnreadTotal(config.max_unread_bytes, clock, budget.on_fall)

        def http(port: str) -> Factory | None:
            context = HttpContext(resources, tables[port], config, connections, budget, web[port], unread)
            context.spare = HttpContext(resources, spare_tables[port], config, spare, budget, web[port], unread)
            return partial(http_connection.Http1Connection, context) if config.allow_http else None

        def http2(port: str) -> Factory | None:
            methods = self._service.methods_of(tables[port])
            context = h2_connection.H2Context(methods, config, connections, clock, budget, any_name, unread)
            few = self._service.methods_of(spare_tables[port])
            context.spare = h2_connection.H2Context(few, config, spare, clock, budget, any_name, unread)
            return partial(h2_connection.H2Connection, context) if config.allow_grpc else None

        self._protocols = {port: (http(port), http2(port)) for port in tables}
        of_metrics = WebAccess.of(config, config.host_of("metrics"))
        metrics = HttpContext(metrics_resources(control), tables[""], config, for_metrics, budget, of_metrics, unread)
        self._metrics = partial(http_connection.Http1Connection, metrics)

    @staticmethod
    def reserve(config: ServerConfig, held: ExitStack) -> ServerConfig:
        """Reserve ports for several processes until ``held`` is closed. Returns ``config`` with the port numbers.

        Raises Unavailable, InvalidConfig.
        """
        ports = {}
        for name in get_args(_Name):
            if getattr(config, f"allow_{name}"):
                with _explained(config, name):
                    socket = held.enter_context(reserve(config.host_of(name), config.port(name)))
                ports[f"{name}_port"] = socket.getsockname()[1]
        return msgspec.structs.replace(config, **ports)

    async def listen(self) -> Addresses:
        """Listen on all addresses. Raises Unavailable, InvalidConfig."""
        config = self._config
        found: dict[str, str] = {}
        if config.allow_http:
            http, http2 = self._protocols["http"]
            found["http"] = await self._listen("http", http, None if config.is_apart else http2)
        if config.allow_grpc:
            http, http2 = self._protocols["grpc"]
            found["grpc"] = await self._listen("grpc", None if config.is_apart else http, http2)
        if config.allow_metrics:
            found["metrics"] = await self._listen("metrics", self._metrics, None)
        http, http2 = self._protocols[""]
        if config.unix_socket and (http or http2):
            with _explained(config, "unix_socket"):
                await self._listener.listen(Endpoint(unix_socket=config.unix_socket, http=http, http2=http2))
        return Addresses(**found)

    def announce_ready(self) -> None:
        """Notify clients that watch the health service."""
        self._service.announce_health()

    def announce_end(self) -> None:
        """Notify clients that the server is shutting down."""
        self._listener.announce_end()
        self._metrics_listener.announce_end()
        self._service.announce_health()

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Stop listening after ``grace_s`` seconds. Returns when all requests are answered, or ``timeout_s`` seconds later."""
        # Idle streams would keep their connections open for ever.
        asyncio.get_running_loop().call_later(grace_s + LAST_REQUEST_S, self._service.drain)
        drains = [listener.drain(grace_s, timeout_s) for listener in (self._listener, self._metrics_listener)]
        await asyncio.gather(*drains)

    def stop(self) -> None:
        """Close all sockets and abort all connections."""
        self._listener.stop()
        self._metrics_listener.stop()

    async def _listen(self, name: _Name, http: Factory | None, http2: Factory | None) -> str:
        config = self._config
        endpoint = Endpoint(
            host=config.host_of(name),
            port=config.port(name),
            reuse_port=config.processes > 1,
            tls=make_context(config) if name == "grpc" or (name == "http" and config.http_tls) else None,
            http=http,
            http2=http2,
        )
        with _explained(config, name):
            listener = self._metrics_listener if name == "metrics" else self._listener
            return _written(*await listener.listen(endpoint))


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _explained(config: ServerConfig, name: _Name | Literal["unix_socket"]) -> Iterator[None]:
    """Convert the operating system's errors about an address to Unavailable with a hint."""
    try:
        yield
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if name == "unix_socket":
            raise Unavailable(f"cannot listen on '{config.unix_socket}': {reason}", "choose another path") from None
        is_of_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise Unavailable(
            f"cannot listen on {config.host_of(name)}:{config.port(name)}: {reason}",
            f"choose another --{name}-port; 0 selects a free port"
            if is_of_port
            else "--host must be an address of this machine; 0.0.0.0 listens on all addresses",
        ) from None
