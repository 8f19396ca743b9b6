"""The HTTP server: listens, bounds its connections, drains. What happens on one connection is in ``http_connection.py``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress

from penstock.clock import Clock
from penstock.online.server.config import ServerConfig
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http_connection import LAST_REQUEST_S, Connection, Shared

_log = logging.getLogger(__name__)


class HttpServer:
    """Accepts connections and bounds them. Belongs to the event loop; ``start`` begins listening."""

    def __init__(self, dataplane: DataPlane, config: ServerConfig, clock: Clock) -> None:
        self._shared = Shared(dataplane, config, self._forget)
        self._config = config
        self._clock = clock
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address bound. Raises OSError."""
        host, port = self._config.host, self._config.http_port
        if port == 0:
            host = await _one_address(host)
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._shared), host, port, backlog=4096
        )
        self._sweep_later()
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    def sweep(self) -> None:
        """Cut off connections that take longer than they may: one pass over all, and no timer per connection."""
        now = self._clock.now()
        for connection in list(self._shared.connections):
            connection.check_time(now)

    def announce_end(self) -> None:
        """From now on answers tell clients that the connection closes after them."""
        self._shared.draining = True

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Stop listening after ``grace_s``; close each connection after its next answer, or once it has stayed idle for a
        moment, and after ``timeout_s`` the rest.
        """
        self.announce_end()
        await asyncio.sleep(grace_s)
        await self._stop_listening()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until_empty(LAST_REQUEST_S)
                for connection in list(self._shared.connections):
                    connection.close_if_idle()
                await self._wait_until_empty(None)
        except TimeoutError:
            _log.warning("%d connections were cut off: not done within %g s", len(self._shared.connections), timeout_s)
        self.stop()

    def stop(self) -> None:
        """Cut off everything."""
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._shared.connections):
            connection.abort()

    async def _stop_listening(self) -> None:
        """Close the listener, but take what has connected before: the system would reset what nobody has accepted."""
        if self._listener is None:
            return
        loop = asyncio.get_running_loop()
        # Of the loop's own sockets, which close with the listener, these keep the queues alive.
        sockets = [socket.socket(fileno=os.dup(listening.fileno())) for listening in self._listener.sockets]
        for listening in self._listener.sockets:
            loop.remove_reader(listening.fileno())
        # asyncio needs the listener for one more turn to set up what it has just accepted.
        await asyncio.sleep(0)
        self._listener.close()
        accepted: list[socket.socket] = []
        for listening in sockets:
            with listening:
                listening.setblocking(False)
                with suppress(OSError):
                    while True:
                        accepted.append(listening.accept()[0])
        for client in accepted:
            client.setblocking(False)
            await loop.connect_accepted_socket(lambda: Connection(self._shared), client)

    async def _wait_until_empty(self, timeout_s: float | None) -> None:
        """Return when no connection is left, at the latest after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._shared.connections:
                    self._empty.clear()
                    await self._empty.wait()

    def _sweep_later(self) -> None:
        interval = min(1.0, self._config.request_timeout_s / 4, self._config.idle_timeout_s / 4)
        self._sweeper = asyncio.get_running_loop().call_later(max(0.01, interval), self._sweep_and_again)

    def _sweep_and_again(self) -> None:
        self.sweep()
        self._sweep_later()

    def _forget(self, connection: Connection) -> None:
        self._shared.connections.discard(connection)
        if not self._shared.connections:
            self._empty.set()


async def _one_address(host: str) -> str:
    """An address of ``host``, of IPv4 where there is one: each of several would get another free port. Raises OSError."""
    addresses = await asyncio.get_running_loop().getaddrinfo(
        host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    *_, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    return str(address[0])
