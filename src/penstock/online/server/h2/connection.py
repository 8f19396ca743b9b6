"""One HTTP/2 connection that carries gRPC, as an asyncio protocol.

All frames of what is received at once are walked in place (``h2/reader.py``), and what they give rise to (``h2/session.py``)
is written at once (``h2/outbox.py``). What a client can cost the server is bounded: memory by windows and limits, work by
``h2/guard.py``, and time by ``check_time`` here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from penstock.clock import Clock
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.guard import FloodGuard
from penstock.online.server.h2.reader import FrameReader
from penstock.online.server.h2.receiver import FrameReceiver
from penstock.online.server.h2.session import CONNECTION_WINDOW, MAX_FRAME, STREAM_WINDOW, H2Session
from penstock.online.server.network.connections import LAST_REQUEST_S, Connections, ServerConnection, end_sending
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

T = TypeVar("T")

_WRITE_BUFFER = 1 << 20
_PROGRESS_BYTES = 1 << 16
_PADDING_BYTES = 256
_DIRECT_BYTES = 64 << 10
"""If more than this is missing of a DATA frame, it is received without a step between."""
_PROBE = h2.ping(b"penstock")


class H2Context:
    """What all HTTP/2 connections of one server have in common."""

    def __init__(
        self,
        methods: Mapping[bytes, GrpcMethod],
        config: ServerConfig,
        connections: Connections,
        clock: Clock,
        budget: ByteBudget | None = None,
    ) -> None:
        self.methods = methods
        self.config = config
        self.connections = connections
        self.clock = clock
        self.budget = budget or ByteBudget(0)
        self.max_control_frame = max(h2.MIN_FRAME_SIZE, config.max_header_bytes + _PADDING_BYTES)
        self.greeting = h2.settings(
            {
                h2.MAX_CONCURRENT_STREAMS: config.max_streams,
                h2.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                h2.MAX_FRAME_SIZE: MAX_FRAME,
                h2.MAX_HEADER_LIST_SIZE: config.max_header_bytes,
            }
        ) + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)


class H2Connection(ServerConnection):
    """One client."""

    protocol = "HTTP/2"

    __slots__ = (
        "_discarding",
        "_outbox",
        "_probed",
        "_reader",
        "_reads",
        "_seen",
        "_session",
        "_shared",
        "_since",
        "_transport",
    )

    def __init__(self, shared: H2Context) -> None:
        self._shared = shared
        guard = FloodGuard(shared.clock)
        self._session = H2Session(
            shared.methods, shared.config, shared.clock, guard, shared.budget, self._hang_up_later
        )
        self._reader = FrameReader(self._session, guard, MAX_FRAME, shared.max_control_frame)
        self._outbox = self._session.outbox
        self._transport: asyncio.Transport | None = None
        self._discarding = False  # what still comes in is thrown away
        self._reads = 0
        self._probed = False
        self._seen: tuple[object, ...] = ()
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_BUFFER)
        self._outbox.open(self._transport)
        self._outbox.control(self._shared.greeting)
        if not self._shared.connections.add(self):
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many connections"))
        elif self._shared.connections.leaving:
            self.begin_drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._discarding = True
        self._session.lose_all()
        self._outbox.close()
        self._shared.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._receive(self._reader.feed, data)
        if self._reader.missing > _DIRECT_BYTES and self._transport is not None and self.place() is not None:
            self._transport.set_protocol(FrameReceiver(self))

    def _receive(self, take: Callable[[T], None], what: T) -> None:
        self._reads += 1
        outbox = self._outbox
        outbox.corked = True
        try:
            take(what)
        except ConnectionFault as fault:
            self._fail(fault)
        finally:
            outbox.corked = False
        outbox.flush()

    def place(self) -> memoryview | None:
        """See ``FrameOwner``; as the next two."""
        place = None if self._discarding else self._session.place(self._reader.stream_id)
        return None if place is None else place[: self._reader.missing]

    def written(self, count: int) -> None:
        self._receive(self._reader.skip, count)
        if not self._reader.missing and self._transport is not None:
            self._transport.set_protocol(self)

    def take_back(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.set_protocol(self)
        self.data_received(data)

    def pause_writing(self) -> None:
        # A client that reads nothing gets no answers to PING and SETTINGS either: they would pile up.
        self._outbox.paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._outbox.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._outbox.flush()

    def begin_drain(self) -> None:
        """Tell the client to ask elsewhere; what it had asked before it knew is still taken (RFC 9113, section 6.8)."""
        self._outbox.control(h2.goaway(h2.MAX_STREAM_ID, ErrorCode.NO_ERROR, "the server is shutting down"))

    def close_if_idle(self) -> None:
        """Take no new stream, and close after the last answer."""
        if not self._discarding:
            self._outbox.control(h2.goaway(self._session.last_id, ErrorCode.NO_ERROR))
            self._session.end()

    def abort(self) -> None:
        """Close at once, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now: float) -> None:
        """Cut off a client, or end a call of it, if nothing has come forward for longer than it may; ``now`` in seconds."""
        transport, session, config = self._transport, self._session, self._shared.config
        if transport is None:
            return
        for stream in list(session.streams.values()):
            stream.check_time(now, config.request_timeout_s, config.idle_timeout_s)
        unwritten = transport.get_write_buffer_size()
        asking = self._reader.is_waiting
        sent = (self._outbox.written - unwritten) // _PROGRESS_BYTES if unwritten else 0
        received = self._reader.progress if asking else self._reads if session.streams else session.last_id
        seen = (bool(unwritten), asking, bool(session.streams), sent, received)
        if seen != self._seen:
            self._seen, self._since, self._probed = seen, now, False
            return
        waited = now - self._since
        if unwritten or self._discarding:
            if waited >= config.idle_timeout_s:
                transport.abort()
        elif asking:
            if waited >= config.request_timeout_s:
                self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too long for what was begun"))
        elif session.streams:
            self._probe(waited)
        elif waited >= config.idle_timeout_s:
            self.close_if_idle()

    def _probe(self, waited: float) -> None:
        """Ask a client that says nothing whether it is still there: it may be waiting for a slow answer."""
        assert self._transport is not None
        patience = self._shared.config.idle_timeout_s
        if waited >= patience and not self._probed:
            self._probed = True
            self._outbox.control(_PROBE)
        elif waited >= 2 * patience:
            self._transport.abort()

    def _fail(self, fault: ConnectionFault) -> None:
        """Say what is wrong, and close."""
        self._discarding = True
        self._session.lose_all()
        self._outbox.control(h2.goaway(self._session.last_id, fault.code, fault.reason))
        self._hang_up_later()

    def _hang_up_later(self) -> None:
        """Once what has been said by then is written."""
        asyncio.get_running_loop().call_soon(self._hang_up)

    def _hang_up(self) -> None:
        """Close, but after the client, if it does so soon: closing with unread data would reset the connection and might take
        the last answer with it.
        """
        self._discarding = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._outbox.flush()
        self._outbox.close()
        end_sending(transport)
        asyncio.get_running_loop().call_later(LAST_REQUEST_S, transport.close)
