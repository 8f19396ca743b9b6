"""The sockets on which the server listens: TCP and Unix sockets, with or without TLS, for HTTP/1.1, HTTP/2 or both."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import socket
import ssl
import stat
import struct
import sys
from contextlib import suppress

import msgspec

from penstock.clock import Clock
from penstock.online.server.config import ServerConfig
from penstock.online.server.network.connections import LAST_REQUEST_S, Connections
from penstock.online.server.network.sniffer import Factory, Sniffer

_log = logging.getLogger(__name__)

_BACKLOG = 4096
_HANDSHAKE_S = 10.0
_ACCEPT_TURNS = 4
_ACCEPTS_A_TURN = 16
_OWNER_ONLY = 0o600
_LAST_HANDSHAKES_S = 0.05
_SO_ATTACH_FILTER = 26
_DROP_SYN = b"".join(
    struct.pack("HBBI", *step)  # code, jump if true, jump if false, constant: classic BPF, on the TCP header
    for step in (
        (0x30, 0, 0, 13),  # load the flags byte
        (0x45, 0, 1, 0x02),  # test the flag SYN
        (0x06, 0, 0, 0),  # if set, drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),  # otherwise, accept all of it
    )
)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One address on which to listen, and its protocols."""

    host: str = ""
    """Name or address of this machine; empty means all addresses."""
    port: int = 0
    """Port number; 0 selects a free port."""
    unix_socket: str = ""
    """Path of a Unix socket. If set, the endpoint listens on this socket. Only the server's own user may connect."""
    reuse_port: bool = False
    """True to share the port with other processes. The operating system then distributes the connections."""
    tls: ssl.SSLContext | None = None
    """TLS context. ``listen`` sets the context's ALPN protocols, so endpoints with different protocols need different contexts."""
    http: Factory | None = None
    """Creates HTTP/1.1 connections."""
    http2: Factory | None = None
    """Creates HTTP/2 connections. ``http``, ``http2`` or both must be set."""


class Listener:
    """All endpoints of one server. Used only on the event loop."""

    def __init__(self, connections: Connections, config: ServerConfig, clock: Clock) -> None:
        self._connections = connections
        self._config = config
        self._clock = clock
        self._servers: list[tuple[asyncio.Server, Endpoint]] = []
        self._paths: dict[str, tuple[int, int]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def is_serving(self) -> bool:
        """True if every endpoint accepts new connections."""
        return bool(self._servers) and all(server.is_serving() for server, _ in self._servers)

    async def listen(self, endpoint: Endpoint) -> tuple[str, int]:
        """Also listen on ``endpoint``. Returns the bound host and port, or the path and 0. Raises OSError."""
        if endpoint.tls is not None:
            # HTTP/1.1 comes first, because curl and browsers offer both protocols and need HTTP/1.1. gRPC clients offer only h2.
            spoken = (("http/1.1", endpoint.http), ("h2", endpoint.http2))
            endpoint.tls.set_alpn_protocols([name for name, factory in spoken if factory is not None])
        if self._sweeper is None:
            self._sweep_later()
        loop, factory, path = asyncio.get_running_loop(), self._factory(endpoint), endpoint.unix_socket
        handshake_s = _HANDSHAKE_S if endpoint.tls else None
        if path:
            bound = _bind_unix(path)
            try:
                server = await loop.create_unix_server(
                    factory, sock=bound, backlog=_ACCEPTS_A_TURN, ssl=endpoint.tls, ssl_handshake_timeout=handshake_s
                )
            except BaseException:
                bound.close()
                raise
            status = os.stat(path)
            self._paths[path] = status.st_dev, status.st_ino
        else:
            server = await loop.create_server(
                factory,
                (await _one_address(endpoint.host) if endpoint.port == 0 else endpoint.host) or None,
                endpoint.port,
                backlog=_ACCEPTS_A_TURN,
                ssl=endpoint.tls,
                ssl_handshake_timeout=handshake_s,
                reuse_port=endpoint.reuse_port or None,
            )
        _lengthen_queues(server)
        self._servers.append((server, endpoint))
        host, port = (path, 0) if path else server.sockets[0].getsockname()[:2]
        return host, port

    def sweep(self) -> None:
        """Abort connections that exceed a time limit. One pass over all connections is cheaper than a timer per connection."""
        self._connections.check_time(self._clock.now())

    def announce_end(self) -> None:
        """From now on, announce in each response that the connection will close."""
        self._connections.draining = True

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Stop listening after ``grace_s`` seconds. Then close idle connections, and abort all others ``timeout_s`` seconds later."""
        self.announce_end()
        await asyncio.sleep(grace_s)
        await self._stop_listening()
        try:
            async with asyncio.timeout(timeout_s):
                await self._connections.drain()
        except TimeoutError:
            _log.warning(
                "%d connections were aborted, because they were still busy after the %g s drain timeout",
                len(self._connections),
                timeout_s,
            )
        self.stop()

    def stop(self) -> None:
        """Close all sockets and abort all connections."""
        for server, _ in self._servers:
            server.close()
        self._remove_paths()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._connections.abort()

    def _factory(self, endpoint: Endpoint) -> Factory:
        http, http2 = endpoint.http, endpoint.http2
        if http is None or http2 is None:
            factory = http or http2
            assert factory is not None
            return factory
        return lambda: Sniffer(self._connections, http, http2, self._config.request_timeout_s)

    async def _stop_listening(self) -> None:
        """Close all listening sockets. Queued connections are accepted first, because the operating system would reset them."""
        loop = asyncio.get_running_loop()
        turned_away = [_turn_away(listening) for server, _ in self._servers for listening in server.sockets]
        if any(turned_away):
            await asyncio.sleep(_LAST_HANDSHAKES_S)
        # Duplicates of the listening sockets keep the queues alive after asyncio's servers are closed.
        queues = [
            (socket.socket(fileno=os.dup(listening.fileno())), endpoint)
            for server, endpoint in self._servers
            for listening in server.sockets
        ]
        for server, _ in self._servers:
            for listening in server.sockets:
                loop.remove_reader(listening.fileno())
        # asyncio's servers are needed for one more iteration, to set up the connections that they have just accepted.
        await asyncio.sleep(0)
        for server, _ in self._servers:
            server.close()
        self._remove_paths()
        accepted: list[tuple[socket.socket, Endpoint]] = []
        for queue, endpoint in queues:
            with queue:
                queue.setblocking(False)
                with suppress(OSError):
                    while True:
                        accepted.append((queue.accept()[0], endpoint))
        await asyncio.gather(*(self._take(client, endpoint) for client, endpoint in accepted))
        # Connections that the event loop has accepted itself are registered some iterations later, after the TLS handshake.
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        if any(endpoint.tls for _, endpoint in self._servers):
            await asyncio.sleep(LAST_REQUEST_S)

    async def _take(self, client: socket.socket, endpoint: Endpoint) -> None:
        client.setblocking(False)
        with suppress(OSError):  # the client has disconnected, or aborted the TLS handshake
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory(endpoint),
                client,
                ssl=endpoint.tls,
                ssl_handshake_timeout=LAST_REQUEST_S if endpoint.tls else None,
            )

    def _remove_paths(self) -> None:
        """Remove this server's Unix sockets, but not files that have replaced them."""
        for path, identity in self._paths.items():
            with suppress(FileNotFoundError):
                status = os.stat(path)
                if (status.st_dev, status.st_ino) == identity:
                    os.unlink(path)
        self._paths.clear()

    def _sweep_later(self) -> None:
        interval = min(1.0, self._config.request_timeout_s / 4, self._config.idle_timeout_s / 4)
        self._sweeper = asyncio.get_running_loop().call_later(max(0.01, interval), self._sweep_and_again)

    def _sweep_and_again(self) -> None:
        self.sweep()
        self._sweep_later()


def _lengthen_queues(server: asyncio.Server) -> None:
    """Lengthen the queues of connections that wait to be accepted.

    asyncio's ``backlog`` is not suitable, because asyncio would also try to accept this number of connections per iteration.
    Without a free file descriptor, it would report each failure.
    """
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as queue:
            queue.listen(_BACKLOG)


def _bind_unix(path: str) -> socket.socket:
    """A socket bound to ``path``, for the server's own user only. Raises OSError, also if another server listens there."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        # Linux copies the socket's permissions to the path, so the path is never open to other users.
        os.fchmod(bound.fileno(), _OWNER_ONLY)
        try:
            bound.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_stale(path):
                raise
            os.unlink(path)
            bound.bind(path)
    except BaseException:
        bound.close()
        raise
    return bound


def _is_stale(path: str) -> bool:
    """True if ``path`` is a socket without a listener, left by a server that was killed."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def _turn_away(listening: socket.socket) -> bool:
    """Make the operating system drop new SYN packets. Handshakes in progress still complete. Returns False if impossible.

    Otherwise, a connection whose handshake completes after the last accept would be reset when the socket is closed.
    """
    if listening.family == socket.AF_UNIX or sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(_DROP_SYN)
    try:
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(program))
        )
    except OSError:  # the system forbids socket filters
        return False
    return True


async def _one_address(host: str) -> str:
    """One address of ``host``, if possible an IPv4 address. Several addresses would get different free ports. Raises OSError."""
    addresses = await asyncio.get_running_loop().getaddrinfo(
        host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return str(address[0])
