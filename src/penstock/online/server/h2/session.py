"""The state of one HTTP/2 connection: its streams, its windows, and the effect of each frame. Knows no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from penstock.clock import Clock
from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.grpc_messages import PREFIX
from penstock.online.server.h2.guard import FloodGuard
from penstock.online.server.h2.headers import RESPONSE, TABLE_SIZE_ZERO, CallHead, HeaderReader, trailers
from penstock.online.server.h2.outbox import Outbox
from penstock.online.server.h2.stream import H2Stream
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode, StreamFault
from penstock.request import Deadline

STREAM_WINDOW = 4 << 20
CONNECTION_WINDOW = 16 << 20
MAX_FRAME = 1 << 20

_COPIED_BYTES = 1 << 14
_REMEMBERED = 1024


class H2Session:
    """Handles the frames of one client, and is the ``Carrier`` of its streams. Belongs to the event loop.

    Its handlers of frames may raise ConnectionFault, or StreamFault, which the reader passes to ``on_fault``. ``on_empty`` is
    called when the last stream has ended and no new ones are accepted.
    """

    __slots__ = (
        "_allowance",
        "_budget",
        "_clock",
        "_ended_early",
        "_guard",
        "_headers",
        "_initial_window",
        "_max_message_bytes",
        "_max_streams",
        "_on_empty",
        "ending",
        "last_id",
        "max_unsent_bytes",
        "outbox",
        "ready",
        "streams",
    )

    def __init__(
        self,
        methods: Mapping[bytes, GrpcMethod],
        config: ServerConfig,
        clock: Clock,
        guard: FloodGuard,
        budget: ByteBudget,
        web: WebAccess,
        on_empty: Callable[[], None],
    ) -> None:
        self._max_message_bytes = config.max_request_bytes
        self.max_unsent_bytes = config.max_unsent_bytes
        self._max_streams = config.max_streams
        self._clock = clock
        self._guard = guard
        self._budget = budget
        self._on_empty = on_empty
        self._headers = HeaderReader(methods, config.max_header_bytes, web)
        self.outbox = Outbox(self._sent)
        self.ready = self.outbox.ready
        self._allowance = CONNECTION_WINDOW
        self._initial_window = h2.DEFAULT_WINDOW
        self._ended_early: dict[int, None] = {}  # the client may not know yet that these streams have ended
        self.streams: dict[int, H2Stream] = {}
        """The open streams by id."""
        self.last_id = 0
        """The id of the newest accepted stream."""
        self.ending = False
        """True if no new streams are accepted."""

    # Frames

    def on_data(self, stream_id: int, size: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """A DATA frame that takes ``size`` bytes of the windows; its content starts with ``data[start:stop]``."""
        self._allowance -= size
        if self._allowance < CONNECTION_WINDOW // 2:
            if self._allowance < 0:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
            self.outbox.control(h2.window_update(0, CONNECTION_WINDOW - self._allowance))
            self._allowance = CONNECTION_WINDOW
        stream = self.streams.get(stream_id)
        if stream is None:
            self._on_closed_stream(stream_id)
            return
        if stream.half_closed:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        stream.allowance -= size
        if stream.allowance < 0:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        content = stop - start
        if ended and stream.is_untouched and content >= PREFIX.size:
            flag, length = PREFIX.unpack_from(data, start)
            said = stream.head.content_length
            if (
                length == content - PREFIX.size
                and length <= stream.limit
                and (said is None or said == content)
                and self._budget.take(content)
            ):
                # The common case, a short cut of the general one: the only message, complete in one frame.
                stream.charged = content
                stream.half_closed = True
                start += PREFIX.size
                stream.call(flag, data[start:stop] if length <= _COPIED_BYTES else memoryview(data)[start:stop])
                return
        if not content and not ended:
            self._guard.charge()
        self._receive(stream, ended, data, start, stop)

    def on_more_data(self, stream_id: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """More content of the last DATA frame."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._receive(stream, ended, data, start, stop)

    def place(self, stream_id: int) -> memoryview | None:
        """The memory that further content of the last DATA frame may be written to; None if there is none."""
        stream = self.streams.get(stream_id)
        return None if stream is None or stream.reader is None else stream.reader.place()

    def on_written(self, stream_id: int, ended: bool, count: int) -> None:
        """More content of the last DATA frame has been written to ``place()``."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.written(count)
            self._after(stream, ended)

    def on_headers(self, stream_id: int, ended: bool, block: bytes) -> None:
        """A complete header block."""
        if stream_id <= self.last_id:
            self._on_trailers(stream_id, ended, block)
            return
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"client stream with the even number {stream_id}")
        head = self._headers.read(block)
        if self.ending:
            return  # GOAWAY has told the client to send this request elsewhere
        self.last_id = stream_id
        if head.malformed:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        if len(self.streams) >= self._max_streams:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM)
        if head.method is None:
            self._refuse(stream_id, head.refusal, ended)
        else:
            self._open(stream_id, head, head.method, ended)

    def _open(self, stream_id: int, head: CallHead, method: GrpcMethod, ended: bool) -> None:
        """Begin a call if its method admits the client."""
        client = ""
        if method.admit is not None:
            try:
                client = method.admit(head.metadata)
            except PenstockError as error:
                self._refuse(stream_id, RESPONSE + trailers(error), ended)
                if isinstance(error, ResourceExhausted):
                    self._guard.earn()  # a known client, which shall try again on this connection
                return
        is_unary = method.unary is not None
        limit = self._max_message_bytes if method.max_bytes is None else min(method.max_bytes, self._max_message_bytes)
        stream = H2Stream(self, stream_id, head, self._initial_window, STREAM_WINDOW, is_unary, client, limit)
        self.streams[stream_id] = stream
        if head.timeout_s is not None:
            stream.deadline = Deadline.after(head.timeout_s, self._clock)
        if head.timeout_s is not None or not is_unary:
            stream.begin(head.timeout_s)
        if ended:
            stream.half_close()

    def _refuse(self, stream_id: int, block: bytes, ended: bool) -> None:
        """Answer a request with nothing but ``block``, and keep nothing of it."""
        self.outbox.headers(stream_id, block, h2.END_STREAM)
        self._guard.charge()
        if not ended:
            self._end_early(stream_id, ErrorCode.NO_ERROR)

    def on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Any other frame, of known or unknown type."""
        if kind == h2.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == h2.RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == h2.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == h2.PING:
            h2.check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes")
            h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "a PING on a stream")
            if not flags & h2.ACK:
                self._guard.charge()
                self.outbox.control(h2.ping(payload, h2.ACK))
        elif kind == h2.GOAWAY:
            h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "a GOAWAY on a stream")
            h2.check(len(payload) >= 8, ErrorCode.FRAME_SIZE_ERROR, f"a GOAWAY of {len(payload)} bytes")
        else:
            h2.check(kind != h2.PUSH_PROMISE, ErrorCode.PROTOCOL_ERROR, "a client cannot push")
            self._guard.charge()
            if kind == h2.PRIORITY:
                h2.check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "a PRIORITY on stream 0")
                if len(payload) != 5:
                    raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR)

    def on_fault(self, fault: StreamFault) -> None:
        """Reset the stream of ``fault``."""
        self._guard.charge()
        stream = self.streams.get(fault.stream_id)
        if stream is None:
            self._end_early(fault.stream_id, fault.code)
        else:
            self.reset(stream, fault.code)

    # Streams: see ``Carrier``

    def charge(self, stream: H2Stream, size: int) -> None:
        if not self._budget.take(size):
            raise self._budget.refusal()
        stream.charged += size

    @property
    def turn(self) -> asyncio.Lock:
        return self._budget.turn

    def count(self, stream: H2Stream) -> None:
        reader = stream.reader
        if reader is None or stream.finished:
            return
        held = reader.held + stream.reserved
        if stream.message is not None:
            held += len(stream.message[1])
        more = held - stream.charged
        if more > 0 and not self._budget.take(more):
            stream.abandon(self._budget.refusal())
            return
        if more < 0:
            self._budget.give(-more)
        stream.charged = held

    def grant(self, stream: H2Stream) -> None:
        if stream.allowance < STREAM_WINDOW // 2 and not (
            stream.half_closed or stream.paused or stream.inflating is not None or stream.finished
        ):
            self.outbox.control(h2.window_update(stream.id, STREAM_WINDOW - stream.allowance))
            stream.allowance = STREAM_WINDOW

    def reset(self, stream: H2Stream, code: ErrorCode) -> None:
        if self.streams.pop(stream.id, None) is not None:
            self._lose(stream)
            self._end_early(stream.id, code)
            self._look_whether_empty()

    def end(self) -> None:
        """Accept no new streams."""
        self.ending = True
        self._look_whether_empty()

    def lose_all(self) -> None:
        """End all streams: the connection is lost."""
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            self._lose(stream)

    def _lose(self, stream: H2Stream) -> None:
        stream.lose()
        self._budget.give(stream.charged)

    def _sent(self, stream: H2Stream) -> None:
        """The outbox has sent the last frame of ``stream``."""
        del self.streams[stream.id]
        self._budget.give(stream.charged)
        self._guard.earn()
        if not stream.half_closed:
            self._end_early(stream.id, ErrorCode.NO_ERROR)
        if self.ending:
            self._look_whether_empty()

    def _end_early(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream, and ignore frames that the client sent before it learns of that."""
        self.outbox.control(h2.rst_stream(stream_id, code))
        self._ended_early[stream_id] = None
        if len(self._ended_early) > _REMEMBERED:
            del self._ended_early[next(iter(self._ended_early))]

    def _look_whether_empty(self) -> None:
        if self.ending and not self.streams:
            self._on_empty()

    # Details

    def _receive(self, stream: H2Stream, ended: bool, data: bytes, start: int, stop: int) -> None:
        size = stop - start
        if size:
            stream.receive(data[start:stop] if size <= _COPIED_BYTES else memoryview(data)[start:stop])
        self._after(stream, ended)

    def _after(self, stream: H2Stream, ended: bool) -> None:
        """Update the budget after ``stream`` has received bytes; then end its request, or let the client send more."""
        self.count(stream)
        if ended:
            stream.half_close()
        else:
            self.grant(stream)

    def _on_trailers(self, stream_id: int, ended: bool, block: bytes) -> None:
        """Headers on a stream that exists or has existed."""
        allowed = self._headers.read_trailers(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id not in self._ended_early:
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        elif stream.half_closed:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        elif not (allowed and ended):
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.half_close()

    def _on_closed_stream(self, stream_id: int) -> None:
        """DATA or RST_STREAM on a stream that is not open."""
        h2.check(0 < stream_id <= self.last_id or self.ending, ErrorCode.PROTOCOL_ERROR, "a frame on an idle stream")
        if stream_id not in self._ended_early:
            self._guard.charge()

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        h2.check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, f"a RST_STREAM of {len(payload)} bytes")
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            self._on_closed_stream(stream_id)
            return
        self._lose(stream)
        self._guard.charge()
        self._look_whether_empty()

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        h2.check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, f"a WINDOW_UPDATE of {len(payload)} bytes")
        increment = h2.UINT32.unpack(payload)[0] & h2.MAX_WINDOW
        if stream_id == 0:
            h2.check(increment > 0, ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            window = self.outbox.window + increment
            h2.check(window <= h2.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
            self.outbox.widen(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._on_closed_stream(stream_id)
            return
        if increment == 0:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        if stream.window + increment > h2.MAX_WINDOW:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        stream.window += increment
        if stream.unsent_bytes:
            self.outbox.ready(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & h2.ACK:
            h2.check(not payload, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
            return
        self._guard.charge()
        for name, value in h2.parse_settings(payload):
            if name == h2.INITIAL_WINDOW_SIZE:
                self._set_initial_window(value)
            elif name == h2.MAX_FRAME_SIZE:
                self.outbox.max_frame = value
            elif name == h2.HEADER_TABLE_SIZE and value < h2.DEFAULT_TABLE_SIZE:
                self.outbox.block_start = TABLE_SIZE_ZERO
        self.outbox.control(h2.SETTINGS_ACK)

    def _set_initial_window(self, size: int) -> None:
        """Apply the setting to open streams too; their windows may become negative (RFC 9113, section 6.9.2)."""
        change, self._initial_window = size - self._initial_window, size
        for stream in self.streams.values():
            stream.window += change
            h2.check(stream.window <= h2.MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
            if stream.unsent_bytes:
                self.outbox.ready(stream)
