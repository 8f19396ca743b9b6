"""Detects whether a client on a shared port speaks HTTP/1.1 or HTTP/2, from ALPN or from the first bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from penstock.online.server.network.connections import Connections, ServerConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes that every HTTP/2 client sends (RFC 9113, section 3.4). No HTTP/1.1 request starts with these bytes."""


Factory = Callable[[], ServerConnection]


class Sniffer(ServerConnection):
    """Reads from a new connection until the protocol is known. Then a connection of this protocol replaces the sniffer."""

    __slots__ = ("_connections", "_http", "_http2", "_received", "_since", "_timeout_s", "_transport")

    def __init__(self, connections: Connections, http: Factory, http2: Factory, timeout_s: float) -> None:
        self._connections = connections
        self._http = http
        self._http2 = http2
        self._timeout_s = timeout_s
        self._received = b""
        self._since: float | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        agreed = tls.selected_alpn_protocol() if tls is not None else None
        is_in = self._connections.add(self)
        if not is_in and self._connections.spare is not None:
            self._connections.discard(self)
            self._connections = self._connections.spare
            is_in = self._connections.add(self)
        if not is_in or agreed == "http/1.1":
            self._hand_over(self._http)  # the HTTP connection refuses the client if the limit is exceeded
        elif agreed == "h2":
            self._hand_over(self._http2)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.startswith(PREFACE[: len(self._received)]):
            self._hand_over(self._http)
        elif len(self._received) >= len(PREFACE):
            self._hand_over(self._http2)

    def check_time(self, now: float) -> None:
        """Abort if the client has not sent enough bytes to identify its protocol within the time limit."""
        if self._since is None:
            self._since = now
        elif now - self._since >= self._timeout_s:
            self.abort()

    def begin_drain(self) -> None:
        """Do nothing, because there is no request, and the protocol for a response is unknown."""

    def close_if_idle(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    @property
    def requests(self) -> int:
        return 0

    def make_room(self) -> bool:
        """Close the connection, because the client has not sent a request yet."""
        self.close_if_idle()
        return True

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    def _hand_over(self, factory: Factory) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        protocol = factory()
        self._connections.discard(self)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._received:
            # The new connection may already have been replaced by another protocol.
            cast(asyncio.Protocol, transport.get_protocol()).data_received(self._received)
