"""What one may change about the server."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ServerConfig(msgspec.Struct, frozen=True):
    """Section ``server``: flags of ``penstock serve``, ``PENSTOCK_SERVER_*``, or table ``[server]`` of the file."""

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` is reachable from elsewhere."""
    http_port: _Port = 8000
    """Port for HTTP; 0 picks a free one."""
    max_batch: _Count | None = None
    """Most rows that are merged into one batch, for every model; not given: what its bundle says, or 64."""
    max_request_rows: _Count = 1024
    """Most rows of one request, or ``max_batch`` where that is more; a request of more than ``max_batch`` rows runs alone."""
    instances: _Count | None = None
    """Copies of each model that run side by side; not given: what its bundle says, or 1."""
    max_queue: _Count = 4096
    """Most requests that one model has accepted and not yet answered; more are refused with 503."""
    max_request_bytes: _Count = 64 << 20
    """Largest body of a request; larger ones are refused with 413 before they are read."""
    max_header_bytes: _Count = 64 << 10
    """Most bytes of a request's headers, each header counted with 32 bytes on top; more are refused with 431."""
    max_connections: _Count = 10_000
    """Most connections at once; more are answered 503 and closed."""
    max_pipelined: _Count = 64
    """Most requests of one connection that are worked on at once; more wait unread."""
    request_timeout_s: _Seconds = 60.0
    """Longest that a client may take to send one request."""
    idle_timeout_s: _Seconds = 75.0
    """Longest that a connection may stay open unused, or that a client may leave its answers unread."""
    shutdown_grace_s: _Seconds = 0.5
    """How long new connections are still taken after readiness went off, so that load balancers notice first."""
    drain_timeout_s: _Seconds = 30.0
    """Longest that shutting down waits for requests in flight and for models at work."""
    allow_client_shm: Literal["auto", "true", "false"] = "auto"
    """Whether clients may register shared memory; ``auto``: where ``host`` is loopback, so that they are on this machine."""
    event_loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    """``auto`` takes uvloop where it is installed."""

    @property
    def client_shm(self) -> bool:
        """What ``allow_client_shm`` comes to."""
        if self.allow_client_shm != "auto":
            return self.allow_client_shm == "true"
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
