"""The state of one HTTP/2 connection: its streams, its windows, and the effect of each frame. Independent of sockets."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.clock import Clock
from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.gate import Gate
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.call_queue import CallQueue
from penstock.online.server.h2.closed_streams import ClosedStreams
from penstock.online.server.h2.grpc_messages import PREFIX
from penstock.online.server.h2.guard import CALL, FloodGuard
from penstock.online.server.h2.headers import RESPONSE, CallHead, HeaderReader, trailers
from penstock.online.server.h2.outbox import Outbox
from penstock.online.server.h2.owner import NoOwner, Owner
from penstock.online.server.h2.stream import H2Stream
from penstock.online.server.network.turns import BEGIN_UNITS, LOSS_UNITS
from penstock.online.server.network.unread import Unread
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode, StreamFault
from penstock.request import Deadline

STREAM_WINDOW = 4 << 20
CONNECTION_WINDOW = 16 << 20
MAX_FRAME = 1 << 20
STREAM_BYTES = 2 << 10
"""Memory of an open stream, its deadline, and a message of ``INCLUDED_BYTES``. Headers and larger messages are added to it."""
INCLUDED_BYTES = 1 << 10
"""If the only message of a call has at most this number of bytes, it is not charged separately."""

_LOW_ALLOWANCE = CONNECTION_WINDOW // 2
_COPIED_BYTES = 1 << 14
_PREFIX_BYTES = PREFIX.size
_SMALL_BYTES = 256
"""Bytes of DATA below which a frame is charged to the guard, unless the frame ends a request."""
_BYTES_A_UNIT = 8
"""Bytes of a header block whose decoding takes about as long as processing one frame."""
_MAX_SETTINGS = 64
_HEAD_BYTES = 4 << 20
"""Maximum bytes of the headers of all open streams. Beyond it, new streams are refused."""
_STREAMS_A_FRAME = 16
_NO_OWNER = NoOwner()


class H2Session:
    """Handles the frames of one connection, and is the ``Carrier`` of its streams. Used only on the event loop.

    Methods that handle frames may raise ConnectionFault or StreamFault. The reader passes a StreamFault to ``on_fault``.
    """

    __slots__ = (
        "_allowance", "_budget", "_clock", "_closed", "_head_bytes", "_headers", "_max_message_bytes", "_max_streams", "_owner",
        "answered", "calls", "ending", "guard", "last_id", "max_unsent_bytes", "outbox", "ready", "streams", "unread",
    )  # fmt: skip

    def __init__(
        self,
        methods: Mapping[bytes, GrpcMethod],
        config: ServerConfig,
        clock: Clock,
        budget: ByteBudget,
        web: WebAccess,
        unread: Unread,
        owner: Owner,
    ) -> None:
        self._max_message_bytes, self._max_streams = config.max_request_bytes, config.max_streams
        self.max_unsent_bytes = config.max_unsent_bytes
        self._clock, self._budget, self._owner = clock, budget, owner
        self._headers = HeaderReader(methods, config.max_header_bytes, web)
        self.unread = unread
        self.outbox = outbox = Outbox(self._sent, unread)
        self.ready = outbox.ready
        self.guard = FloodGuard(clock, lambda: outbox.written)
        self._head_bytes, self._allowance, self._closed = 0, CONNECTION_WINDOW, ClosedStreams()
        self.calls = CallQueue(unread, config.max_unsent_bytes, owner.continue_later)
        self.streams: dict[int, H2Stream] = {}  # the open streams by id
        self.last_id = self.answered = 0  # the id of the newest accepted stream; the number of calls answered
        self.ending = False  # True if no new streams are accepted

    # Frames

    def on_data(self, stream_id: int, size: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """Handle a DATA frame that uses ``size`` bytes of the windows. The first part of its content is ``data[start:stop]``."""
        self._allowance -= size
        if self._allowance < _LOW_ALLOWANCE:
            if self._allowance < 0:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
            self.outbox.control(h2.window_update(0, CONNECTION_WINDOW - self._allowance))
            self._allowance = CONNECTION_WINDOW
        stream = self.streams.get(stream_id)
        if (stream is None or not ended) and size < _SMALL_BYTES:
            self.guard.charge()
        if stream is None:
            self._on_closed_data(stream_id, ended)
            return
        if stream.half_closed:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        stream.allowance = allowance = stream.allowance - size
        if allowance < 0:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
        content = stop - start
        if ended and stream.is_untouched and content >= _PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(data, start)
            said = stream.head.content_length
            if (
                length == content - _PREFIX_BYTES
                and length <= stream.limit
                and (said is None or said == content)
                and self.calls.admits(stream)
                and (content <= INCLUDED_BYTES or self._take(stream, content))
            ):
                # Fast path for the common case: the only message of the call, complete in one frame.
                stream.half_closed = True
                start += _PREFIX_BYTES
                stream.call(flag, data[start:stop] if length <= _COPIED_BYTES else memoryview(data)[start:stop])
                return
        self._receive(stream, ended, data, start, stop)

    def on_more_data(self, stream_id: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """Handle more content of the last DATA frame."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._receive(stream, ended, data, start, stop)

    def place(self, stream_id: int) -> memoryview | None:
        """The memory for further content of the last DATA frame; None if the content must be passed to ``on_more_data``."""
        stream = self.streams.get(stream_id)
        return None if stream is None or stream.reader is None else stream.reader.place()

    def on_written(self, stream_id: int, ended: bool, count: int) -> None:
        """Handle ``count`` bytes of the last DATA frame that were written to ``place()``."""
        if (stream := self.streams.get(stream_id)) is not None:
            stream.written(count)
            self._after(stream, ended)

    def on_headers(self, stream_id: int, ended: bool, block: bytes) -> None:
        """Handle a complete header block."""
        if stream_id <= self.last_id:
            self._on_trailers(stream_id, ended, block)
            return
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"client stream with the even number {stream_id}")
        head = self._headers.known.get(block)
        if head is None:
            self.calls.units -= len(block) // _BYTES_A_UNIT
            head = self._headers.read(block)
        if self.ending:
            self.guard.charge()
            return  # after GOAWAY, the client sends this request again over another connection
        if stream_id > self.last_id + 2:
            self._closed.leave_out(range(self.last_id + 1, stream_id))
        self.last_id = stream_id
        if head.malformed:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        if len(self.streams) >= self._max_streams or self._head_bytes > _HEAD_BYTES:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM)
        if head.method is None:
            self._refuse(stream_id, head.refusal, ended, head.text)
        else:
            self._open(stream_id, head, head.method, ended)

    def _open(self, stream_id: int, head: CallHead, method: GrpcMethod, ended: bool) -> None:
        """Begin a call if its method admits the client."""
        client, size = "", STREAM_BYTES + head.size
        try:
            if method.admit is not None:
                client = method.admit(head.metadata)
            if not self._budget.take(size):
                raise self._budget.refusal()
        except PenstockError as error:
            self._refuse(stream_id, RESPONSE + trailers(error), ended)
            if isinstance(error, ResourceExhausted):
                self.guard.earned += CALL  # no charge: a known client over its limit may retry on this connection
            return
        is_unary, limit = method.unary is not None, self._max_message_bytes
        if method.max_bytes is not None:
            limit = min(method.max_bytes, limit)
        stream = H2Stream(self, stream_id, head, STREAM_WINDOW, is_unary, client, limit)
        stream.charged = size
        self.streams[stream_id] = stream
        if head.size:
            self._head_bytes += head.size
        if head.timeout_s is not None or not is_unary:
            self.calls.units -= BEGIN_UNITS
            if head.timeout_s is not None:
                stream.deadline = Deadline.after(head.timeout_s, self._clock)
            stream.begin(head.timeout_s)
        if ended:
            stream.half_close()

    def on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle any other frame, including frames of unknown types."""
        if kind == h2.RST_STREAM:
            self._on_reset(stream_id, payload)
            return
        self.guard.charge()
        if kind == h2.WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == h2.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == h2.PING:
            h2.check(len(payload) == 8, ErrorCode.FRAME_SIZE_ERROR, f"a PING of {len(payload)} bytes")
            h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "a PING on a stream")
            if not flags & h2.ACK:
                self.outbox.control(h2.ping(payload, h2.ACK))
        elif kind == h2.GOAWAY:
            h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "a GOAWAY on a stream")
            h2.check(len(payload) >= 8, ErrorCode.FRAME_SIZE_ERROR, f"a GOAWAY of {len(payload)} bytes")
        elif kind == h2.PRIORITY:
            self._on_priority(stream_id, payload)
        else:
            h2.check(kind != h2.PUSH_PROMISE, ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def on_fault(self, fault: StreamFault) -> None:
        """Reset the stream of ``fault``."""
        self.guard.charge(CALL)
        if (stream := self.streams.get(fault.stream_id)) is None:
            self._end_early(fault.stream_id, fault.code)
        else:
            self.reset(stream, fault.code)

    # Streams: see ``Carrier``

    def charge(self, stream: H2Stream, size: int) -> None:
        if not self._take(stream, size):
            raise self._budget.refusal()

    @property
    def gate(self) -> Gate:
        return self._budget.gate

    def delivered(self, size: int) -> None:
        if size:
            self.guard.earned += 1
            return
        try:
            self.guard.charge(2 * CALL)  # this is more than the response to the empty message earns
        except ConnectionFault as fault:
            self.calls.units = 0
            self._owner.fail_later(fault)

    def released(self, size: int) -> None:
        self.unread.remove(size)
        self.guard.earned += CALL
        self.calls.wake()

    def count(self, stream: H2Stream) -> None:
        reader = stream.reader
        if reader is None or stream.finished:
            return
        held = STREAM_BYTES + stream.head.size + reader.held + stream.reserved
        if stream.message is not None:
            held += len(stream.message[1])
        more = held - stream.charged
        if more > 0 and not self._budget.take(more):
            stream.abandon(self._budget.refusal())
            return
        if more < 0:
            self._budget.give(-more)
        stream.charged = held

    def _take(self, stream: H2Stream, size: int) -> bool:
        """Charge ``size`` bytes to the budget until ``stream`` ends. Returns False if the budget's limit is reached."""
        if not self._budget.take(size):
            return False
        stream.charged += size
        return True

    def grant(self, stream: H2Stream) -> None:
        if stream.allowance >= STREAM_WINDOW // 2 or self.calls.waits_for_units(stream) or stream.inflating is not None:
            return
        if not (stream.half_closed or stream.paused or stream.finished) and stream.may_receive():
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

    def close(self) -> None:
        """Send no further frames, because the connection has failed or is lost. ``lose`` ends its streams."""
        for stream in self.streams.values():
            stream.gone = True
        for queue in (self.calls, self.outbox):
            queue.clear()

    def lose(self, units: int) -> int:
        """End streams of a closed session, using about ``units`` units. Returns the units used."""
        used = 0
        while self.streams and used < units:
            used += LOSS_UNITS
            stream = self.streams.popitem()[1]
            stream.lose()
            self._budget.give(stream.charged)
        self.unread.settle()
        return used

    def release(self) -> None:
        """Drop the references to the lost connection, so that no memory has to wait for the garbage collector."""
        self.outbox.close()
        self.unread.close()
        self.calls.release()
        self._owner = _NO_OWNER

    def _lose(self, stream: H2Stream) -> None:
        stream.lose()
        self.outbox.forget(stream)
        self._budget.give(stream.charged)
        self._head_bytes -= stream.head.size
        self.calls.remove(stream)

    def _sent(self, stream: H2Stream) -> None:
        """Clean up after the outbox has sent the last frame of ``stream``."""
        self.answered += 1
        del self.streams[stream.id]
        self._budget.give(stream.charged)
        if stream.head.size:
            self._head_bytes -= stream.head.size
        if stream.passage is not None:
            stream.leave()
        if stream.kept:
            unread = self.unread
            unread.count -= stream.kept
            unread.has_read = True
            self.guard.earned += CALL
        if self.calls.held:
            self.calls.wake()
        if not stream.half_closed:
            self._end_early(stream.id, ErrorCode.NO_ERROR)
        if self.ending:
            self._look_whether_empty()

    def _end_early(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream, and ignore the frames that the client sends before it receives the reset."""
        self.outbox.control(h2.rst_stream(stream_id, code))
        self._closed.reset(stream_id)

    def _look_whether_empty(self) -> None:
        if self.ending and not self.streams:
            self._owner.hang_up_later()

    def _receive(self, stream: H2Stream, ended: bool, data: bytes, start: int, stop: int) -> None:
        size = stop - start
        if size:
            stream.receive(data[start:stop] if size <= _COPIED_BYTES else memoryview(data)[start:stop])
        self._after(stream, ended)

    def _after(self, stream: H2Stream, ended: bool) -> None:
        """Update the budget after ``stream`` has received bytes. Then end its request, or let the client send more."""
        self.count(stream)
        if ended:
            stream.half_close()
        else:
            self.grant(stream)

    def _refuse(self, stream_id: int, block: bytes, ended: bool, text: bytes = b"") -> None:
        """Answer a request with the header block ``block``, and with ``text`` if the windows allow it. Opens no stream."""
        self.guard.charge(CALL)
        size = len(text)
        if 0 < size <= min(self.outbox.window, self.outbox.initial_window):
            self.outbox.headers(stream_id, block, 0)
            self.outbox.control(h2.frame(h2.DATA, h2.END_STREAM, stream_id, text))
            self.outbox.window -= size
        else:
            self.outbox.headers(stream_id, block, h2.END_STREAM)
        if not ended:
            self._end_early(stream_id, ErrorCode.NO_ERROR)

    def _on_trailers(self, stream_id: int, ended: bool, block: bytes) -> None:
        """Handle headers on a stream that is or was open: they are trailers."""
        self.calls.units -= len(block) // _BYTES_A_UNIT
        allowed = self._headers.read_trailers(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            is_late = self._closed.is_left_out(stream_id)
            h2.check(not is_late, ErrorCode.PROTOCOL_ERROR, "a new stream with a number below those in use")
            h2.check(self._closed.is_reset(stream_id), ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            self.guard.charge()
            if ended:
                self._closed.end(stream_id)
        elif stream.half_closed:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED)
        elif not (allowed and ended):
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.half_close()

    def _check_not_idle(self, stream_id: int) -> None:
        h2.check(0 < stream_id <= self.last_id or self.ending, ErrorCode.PROTOCOL_ERROR, "a frame on an idle stream")

    def _on_closed_data(self, stream_id: int, ended: bool) -> None:
        """Handle DATA on a stream that is not open."""
        self._check_not_idle(stream_id)
        if self._closed.is_reset(stream_id):
            if ended:
                self._closed.end(stream_id)
        elif not self.ending:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED)

    def _on_priority(self, stream_id: int, payload: bytes) -> None:
        h2.check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "a PRIORITY on stream 0")
        if (code := h2.priority_fault(stream_id, payload)) is not None:
            # An idle stream cannot be reset.
            h2.check(stream_id <= self.last_id, code, "a faulty PRIORITY on an idle stream")
            raise StreamFault(stream_id, code)

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        h2.check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, f"a RST_STREAM of {len(payload)} bytes")
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            self._check_not_idle(stream_id)
            if not self._closed.end(stream_id):
                self.guard.charge()
            return
        self._lose(stream)
        self.guard.charge(CALL)
        self._look_whether_empty()

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = h2.parse_window_update(payload)
        if stream_id == 0:
            h2.check(increment > 0, ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0")
            self.outbox.widen(increment)
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            return
        if increment == 0:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
        if not self.outbox.widen_stream(stream, increment):
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        h2.check(stream_id == 0, ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        h2.check(not (payload and flags & h2.ACK), ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with a payload")
        if flags & h2.ACK:
            return
        h2.check(len(payload) <= _MAX_SETTINGS * h2.SETTING.size, ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        looked = self.outbox.apply(dict(h2.parse_settings(payload)), self.streams)  # the last of repeated ones counts
        self.calls.units -= looked
        self.guard.charge(looked // _STREAMS_A_FRAME)
        self.outbox.control(h2.SETTINGS_ACK)
