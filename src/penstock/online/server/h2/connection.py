"""One HTTP/2 connection that carries gRPC, as an asyncio protocol.

The reader (``h2/reader.py``) splits received bytes into frames, the session (``h2/session.py``) handles the frames, and the outbox
(``h2/outbox.py``) writes frames in response. The cost of each client is limited. Flow-control windows and size limits bound its
memory. ``h2/guard.py`` and ``Turns`` bound its work. ``check_time`` ends connections and calls that make no progress within their
time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar, cast

from penstock.clock import Clock
from penstock.errors import DeadlineExceeded
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.reader import FrameReader
from penstock.online.server.h2.session import CONNECTION_WINDOW, MAX_FRAME, STREAM_WINDOW, H2Session
from penstock.online.server.h2.stream import H2Stream
from penstock.online.server.network.connections import (
    LAST_REQUEST_S,
    Connections,
    ServerConnection,
    end_sending,
    has_left,
)
from penstock.online.server.network.turns import BYTES_A_UNIT, FREE_UNITS, LOSS_UNITS, SLICE_UNITS
from penstock.online.server.network.unread import Unread, UnreadTotal
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

T = TypeVar("T")

_WRITE_BUFFER = 1 << 20
_PROGRESS_BYTES = 1 << 16
_PADDING_BYTES = 256
_DIRECT_BYTES = 64 << 10
"""If more than this number of bytes of a DATA frame are missing, the operating system writes them directly into the message."""
_DISCARDED_BYTES = 1 << 16
_LINGERING_BYTES = 1 << 16
"""Maximum bytes that the server reads and discards after the connection has failed, so that the client can read the reason before
the connection is reset."""
_CHECKED_STREAMS = 128
"""Number of streams per connection whose time limits are checked in one sweep, because a client may have thousands of streams."""
_EXAMINED_STREAMS = 16
_PROBE = h2.ping(b"penstock")


class H2Context:
    """State that all HTTP/2 connections of one server share."""

    def __init__(
        self,
        methods: Mapping[bytes, GrpcMethod],
        config: ServerConfig,
        connections: Connections,
        clock: Clock,
        budget: ByteBudget | None = None,
        web: WebAccess | None = None,
        unread: UnreadTotal | None = None,
    ) -> None:
        self.spare: H2Context | None = None
        """The context of connections over the connection limit; None if such connections are refused."""
        self.methods = methods
        self.web = web or WebAccess()
        self.config = config
        self.connections = connections
        self.clock = clock
        self.budget = budget or ByteBudget(0)
        self.unread = unread or UnreadTotal(config.max_unread_bytes, clock)
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
    """The connection of one client. Used only on the event loop."""

    protocol = "HTTP/2"

    __slots__ = (
        "_calls",
        "_discarding",
        "_is_queued",
        "_lingering",
        "_outbox",
        "_owed",
        "_probed",
        "_reader",
        "_reads",
        "_seen",
        "_session",
        "_shared",
        "_since",
        "_transport",
        "_turns",
        "_unchecked",
    )

    def __init__(self, shared: H2Context) -> None:
        self._shared = shared
        self._turns = shared.connections.turns
        unread = Unread(shared.unread, self._evict, self._read)
        self._session = H2Session(shared.methods, shared.config, shared.clock, shared.budget, shared.web, unread, self)
        self._reader = FrameReader(self._session, MAX_FRAME, shared.max_control_frame)
        self._outbox, self._calls = self._session.outbox, self._session.calls
        self._transport: asyncio.Transport | None = None
        self._discarding = False
        self._is_queued = False
        self._lingering = _LINGERING_BYTES
        self._owed = 0  # units for received bytes that are not charged yet
        self._reads = 0
        self._probed = False
        self._seen: tuple[object, ...] = ()
        self._since = 0.0
        self._unchecked: list[H2Stream] = []  # streams whose time limits are checked next

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_in = self._shared.connections.add(self)
        # uvloop's transports do not derive from asyncio's.
        if not is_in and self._shared.spare is not None:
            self.connection_lost(None)
            other = H2Connection(self._shared.spare)
            cast(asyncio.Transport, transport).set_protocol(other)
            other.connection_made(transport)
            return
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_WRITE_BUFFER)
        self._outbox.open(self._transport)
        self._outbox.control(self._shared.greeting)
        if not is_in:
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many connections"))
        elif self._shared.connections.leaving:
            self.begin_drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._close()
        self._unchecked.clear()
        self._shared.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._linger(len(data))
            return
        used = self._receive(self._reader.feed, data)
        if used > FREE_UNITS or len(data) >= BYTES_A_UNIT:
            self._spend(used, len(data))
        if self._reader.missing > _DIRECT_BYTES and self._transport is not None and self.place() is not None:
            self._transport.set_protocol(FrameReceiver(self))

    def _spend(self, used: int, size: int) -> None:
        """Charge the connection for ``size`` received bytes and ``used`` units of work. If they exceed its turn, pause reading."""
        arrived = size // BYTES_A_UNIT
        if arrived and used + arrived > self._turns.left:
            self._owed += arrived
            self.continue_later()
        else:
            used += arrived
        if used > FREE_UNITS:
            self._turns.spend(used)

    def _linger(self, size: int) -> None:
        """Discard ``size`` bytes that have arrived after the connection has failed."""
        self._lingering -= size
        if self._lingering < 0 and self._transport is not None:
            self._transport.pause_reading()

    def _receive(self, take: Callable[[T], None], what: T, units: int = 0) -> int:
        """Call ``take(what)`` with ``units`` units (0: those for new data), then write the queued frames. Returns the units used."""
        self._reads += 1
        outbox, calls, turns = self._outbox, self._calls, self._turns
        if not units:
            units = turns.left if turns.left > FREE_UNITS else FREE_UNITS
        calls.units = units
        outbox.corked = True
        try:
            take(what)
            if self._reader.is_behind and not calls.is_occupied:  # ``occupy`` continues an occupied session
                self.continue_later()
        except ConnectionFault as fault:
            self._fail(fault)
        finally:
            outbox.corked = False
        outbox.flush()
        return units - calls.units

    def work(self, units: int) -> int:
        """See ``TurnTaker``."""
        self._is_queued = False
        if self._discarding:
            used = self._lose(units)
            self._read_or_not()
            return used
        owed = min(self._owed, units)
        self._owed -= owed
        if owed == units:
            self.continue_later()
            return owed
        # While the client does not read, more responses would only accumulate. ``resume_writing`` continues the work.
        used = 0 if self._outbox.paused else self._receive(self._go_on, self._reader, units - owed)
        self._read_or_not()
        return owed + used

    def _go_on(self, reader: FrameReader) -> None:
        self._calls.go_on()
        if reader.is_behind and not self._calls.is_occupied:
            reader.go_on()

    def continue_later(self) -> None:
        """See ``Owner``, also for ``fail_later`` and ``hang_up_later``."""
        if not (self._is_queued or self._discarding):
            self._is_queued = True
            self._turns.add(self)
            self._read_or_not()

    def _read_or_not(self) -> None:
        """Pause reading if the client does not read its responses, or has sent too much work. Otherwise, resume reading."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._is_paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    @property
    def _is_paused(self) -> bool:
        """True if nothing is read from the client at present."""
        return self._outbox.paused or self._is_queued or self._calls.is_occupied

    def place(self) -> memoryview | None:
        """The memory for the missing bytes of a large DATA frame; None if they must be received through ``data_received``."""
        place = None if self._discarding else self._session.place(self._reader.stream_id)
        return None if place is None else place[: self._reader.missing]

    def written(self, count: int) -> None:
        """Process ``count`` bytes that have been written to ``place()``."""
        self._spend(self._receive(self._reader.skip, count), count)
        if not self._reader.missing and self._transport is not None:
            self._transport.set_protocol(self)

    def take_back(self, data: bytes) -> None:
        """Receive ``data`` and all further bytes through ``data_received`` again."""
        if self._transport is not None:
            self._transport.set_protocol(self)
        self.data_received(data)

    def pause_writing(self) -> None:
        # Also stop reading, because responses to PING and SETTINGS would accumulate for a client that reads nothing.
        self._outbox.paused = True
        self._read_or_not()

    def resume_writing(self) -> None:
        self._outbox.paused = False
        self._outbox.flush()
        if not self._outbox.paused:
            self.continue_later()

    def begin_drain(self) -> None:
        """Send GOAWAY, so that the client connects elsewhere. Calls that it has already sent are accepted (RFC 9113, section 6.8)."""
        self._outbox.control(h2.goaway(h2.MAX_STREAM_ID, ErrorCode.NO_ERROR, "the server is shutting down"))

    def close_if_idle(self) -> None:
        """Accept no new streams, and close after the last response."""
        if not self._discarding:
            self._outbox.control(h2.goaway(self._session.last_id, ErrorCode.NO_ERROR))
            self._session.end()

    @property
    def requests(self) -> int:
        """See ``ServerConnection``. Examines at most ``_EXAMINED_STREAMS`` open streams, so the number may be too low."""
        begun = islice(self._session.streams.values(), _EXAMINED_STREAMS)
        return self._session.answered + sum(stream.half_closed or stream.delivered > 0 for stream in begun)

    def make_room(self) -> bool:
        is_busy = bool(self._session.streams) or self._reader.is_waiting
        if self._transport is None or self._discarding or (is_busy and self.requests):
            return False
        self.close_if_idle()
        if is_busy:
            self.abort()
        return True

    def abort(self) -> None:
        """Close immediately, without answering calls in flight."""
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now: float) -> None:
        """End the connection, or a call, if it has made no progress within its time limit. ``now`` is in seconds."""
        transport, session, config = self._transport, self._session, self._shared.config
        if transport is None:
            return
        if self._is_paused and has_left(transport) is not False:
            transport.abort()  # a client that has closed its side gives up its calls
            return
        if not self._unchecked:
            self._unchecked = list(session.streams.values())
        for stream in self._unchecked[-_CHECKED_STREAMS:]:
            _check_stream(stream, now, config)
        del self._unchecked[-_CHECKED_STREAMS:]
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
                self._fail(
                    ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a frame or the preface was not received in time")
                )
        elif session.streams:
            self._probe(waited)
        elif waited >= config.idle_timeout_s:
            self.close_if_idle()

    def _probe(self, waited: float) -> None:
        """Send PING to a silent client, which may be waiting for a slow response. Abort if the client stays silent."""
        assert self._transport is not None
        patience = self._shared.config.idle_timeout_s
        if waited >= patience and not self._probed:
            self._probed = True
            self._outbox.control(_PROBE)
        elif waited >= 2 * patience:
            self._transport.abort()

    def _fail(self, fault: ConnectionFault) -> None:
        """Send GOAWAY with the reason, and close."""
        self._close()
        self._outbox.control(h2.goaway(self._session.last_id, fault.code, fault.reason))
        self.hang_up_later()

    def _close(self) -> None:
        """Receive no further frames, and end all streams. This is done in turns, because there may be thousands of streams."""
        self._discarding = True
        self._reader.close()
        self._session.close()
        self._lose(SLICE_UNITS)

    def _lose(self, units: int) -> int:
        used = self._session.lose(units)
        if not self._session.streams:
            if self._transport is None:
                self._session.release()
        elif not self._is_queued:
            self._is_queued = True
            self._turns.add(self)
        return used

    def _read(self) -> int:
        return self._outbox.read()

    def _evict(self) -> None:
        self._fail_unless_discarding(
            ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "unread responses take memory that others need")
        )
        self._session.lose(LOSS_UNITS * len(self._session.streams))  # not in turns, because the memory is needed now

    def fail_later(self, fault: ConnectionFault) -> None:
        asyncio.get_running_loop().call_soon(self._fail_unless_discarding, fault)

    def _fail_unless_discarding(self, fault: ConnectionFault) -> None:
        if not self._discarding:
            self._fail(fault)

    def hang_up_later(self) -> None:
        """Close once all frames of this event-loop iteration are written."""
        asyncio.get_running_loop().call_soon(self._hang_up)

    def _hang_up(self) -> None:
        """Half-close the connection, and give the client a moment to close it first. If the server closed it while data is unread,
        the connection would be reset, and the client might lose the last response.
        """
        self._discarding = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._outbox.flush()
        self._outbox.close()
        end_sending(transport)
        asyncio.get_running_loop().call_later(LAST_REQUEST_S, transport.close)


def _check_stream(stream: H2Stream, now: float, config: ServerConfig) -> None:
    """End a call if its client takes too long to send the request or to read the responses."""
    method, reader = stream.head.method, stream.reader
    assert method is not None
    is_held = stream.passage is not None and stream.passage.is_waiting
    unread = not (stream.half_closed or stream.paused or stream.finished or is_held)
    asking = unread and (method.unary is not None or not (reader is None or reader.is_between))
    read = 0 if method.stream is None else stream.received // _PROGRESS_BYTES + stream.delivered
    seen = (stream.sent_bytes // _PROGRESS_BYTES, read, asking)
    if seen != stream.seen or not (stream.unsent_bytes or asking):
        stream.seen, stream.since = seen, now
        return
    waited = now - stream.since
    if stream.unsent_bytes and waited >= config.idle_timeout_s:
        stream.carrier.reset(stream, ErrorCode.CANCEL)
    elif asking and waited >= config.request_timeout_s:
        stream.abandon(DeadlineExceeded(f"the request took longer than {config.request_timeout_s:g} s to arrive"))


class FrameReceiver(asyncio.BufferedProtocol):
    """Replaces the connection as the transport's protocol until a large DATA frame is complete, or its call has ended.

    The operating system writes the received bytes directly into the message.
    """

    __slots__ = ("_owner", "_unwanted")

    def __init__(self, owner: H2Connection) -> None:
        self._owner = owner
        self._unwanted: bytearray | None = None

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        place = self._owner.place()
        if place is not None:
            return place
        # The call has ended, so the connection skips the rest of its frame.
        self._unwanted = bytearray(_DISCARDED_BYTES)
        return self._unwanted

    def buffer_updated(self, nbytes: int) -> None:
        if self._unwanted is None:
            self._owner.written(nbytes)
        else:
            self._owner.take_back(bytes(memoryview(self._unwanted)[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
