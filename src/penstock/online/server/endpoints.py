"""The addresses that a server listens on, with the protocols of each, started and stopped together."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

import msgspec

from penstock.clock import Clock
from penstock.errors import Unavailable
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.service import GrpcService
from penstock.online.server.h2 import connection as h2_connection
from penstock.online.server.http import connection as http_connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.resources import make_resources, metrics_resources
from penstock.online.server.network.connections import LAST_REQUEST_S, Connections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.online.server.network.sniffer import Factory
from penstock.online.server.network.tls import make_context
from penstock.online.server.network.unread import UnreadTotal
from penstock.online.server.processes.supervisor import reserve

_Name = Literal["http", "grpc", "metrics"]

_METRICS_CONNECTIONS = 32
"""Maximum connections of the metrics port. They do not count as ``max_connections``, so monitoring works while clients use all."""


class Addresses(msgspec.Struct, frozen=True):
    """The addresses that the server listens on, each as ``host:port`` or empty."""

    http: str = ""
    grpc: str = ""
    metrics: str = ""


class Endpoints:
    """The listeners of one process. Both ports and the Unix socket accept HTTP and gRPC, as the configuration allows.

    Belongs to the event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        connections: Connections,
        dataplane: DataPlane,
        control: ControlPlane,
        access: Access,
        budget: ByteBudget,
    ) -> None:
        self._config = config
        for_metrics = Connections(_METRICS_CONNECTIONS)
        self._listener = Listener(connections, config, clock)
        self._metrics_listener = Listener(for_metrics, config, clock)
        table = AccessTable(access, config.http_restricted_api, config.grpc_restricted_protocol)
        self._service = GrpcService(dataplane, control, table, config.max_pipelined, budget)
        resources = make_resources(dataplane, control, access, config)
        http = HttpContext(resources, table, config, connections, budget)
        metrics = HttpContext(metrics_resources(control), table, config, for_metrics, budget)
        unread = UnreadTotal(config.max_unread_bytes, clock)
        h2 = h2_connection.H2Context(self._service.methods, config, connections, clock, budget, unread)
        self._http: Factory | None = (lambda: http_connection.Http1Connection(http)) if config.allow_http else None
        self._grpc: Factory | None = (lambda: h2_connection.H2Connection(h2)) if config.allow_grpc else None
        self._metrics: Factory = lambda: http_connection.Http1Connection(metrics)

    @staticmethod
    def reserve(config: ServerConfig, held: ExitStack) -> ServerConfig:
        """Reserve ports for several processes until ``held`` is closed; returns ``config`` with their numbers.

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
            found["http"] = await self._listen("http", self._http, None if config.is_apart else self._grpc)
        if self._grpc is not None:
            found["grpc"] = await self._listen("grpc", None if config.is_apart else self._http, self._grpc)
        if config.allow_metrics:
            found["metrics"] = await self._listen("metrics", self._metrics, None)
        if config.unix_socket and (self._http or self._grpc):
            with _explained(config, "unix_socket"):
                await self._listener.listen(Endpoint(unix_socket=config.unix_socket, http=self._http, http2=self._grpc))
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
        """Stop listening after ``grace_s``; return when all requests are answered, or after another ``timeout_s``."""
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
    """Turn the operating system's errors about an address into Unavailable with a hint."""
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
            else "--host must be an address of this machine; 0.0.0.0 listens on all",
        ) from None
