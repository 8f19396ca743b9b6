"""Writes the frames of one HTTP/2 connection, within the limits of the client's flow-control windows and the socket's buffer.

All frames of one event-loop iteration are written together. Streams with large amounts to send take turns.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from penstock.online.server.h2.headers import OK_TRAILERS, RESPONSE, TABLE_SIZE_ZERO
from penstock.online.server.h2.stream import H2Stream
from penstock.online.server.network.connections import unacknowledged
from penstock.online.server.network.unread import Unread
from penstock.protocol.h2_frames import (
    DATA,
    DEFAULT_TABLE_SIZE,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    MIN_FRAME_SIZE,
    ErrorCode,
    check,
)
from penstock.tensor import Buffer

_TURN_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
_FLUSH_BYTES = 1 << 21
FLUSH_STREAMS = 128
"""Maximum number of streams that one ``flush`` visits. Limiting bytes is not enough, because streams may send one byte each."""
_JOINED_BYTES = 1 << 16
_JOINED_PART = 1 << 12

# The frames around a response of one message, and the header of its DATA frame.
_RESPONSE_START = HEADER.pack(0, len(RESPONSE), HEADERS, END_HEADERS, 0)[:5]
_ANSWER = struct.Struct(f">5sI{len(RESPONSE)}sHBHI")
_OK_START = HEADER.pack(0, len(OK_TRAILERS), HEADERS, END_HEADERS | END_STREAM, 0)[:5]
_OK = struct.Struct(f">5sI{len(OK_TRAILERS)}s")
_AROUND_BYTES = _ANSWER.size + _OK.size


def _ignore(stream: H2Stream) -> None:
    pass


class Outbox:
    """The write side of one connection. Calls ``on_sent`` after the last frame of a stream. Used only on the event loop."""

    __slots__ = (
        "_bytes",
        "_data_end",
        "_frames",
        "_most_credit",
        "_on_sent",
        "_ready",
        "_scheduled",
        "_stalled",
        "_starved",
        "_transport",
        "_unread",
        "block_start",
        "corked",
        "initial_window",
        "max_frame",
        "paused",
        "window",
        "written",
    )

    def __init__(self, on_sent: Callable[[H2Stream], None], unread: Unread) -> None:
        self._transport: asyncio.Transport | None = None
        self._on_sent = on_sent
        self._unread = unread
        self._frames: list[Buffer] = []
        self._bytes = 0
        self._data_end = 0  # the position in all bytes written after the last message, or part of one, that had to wait
        self._ready: deque[H2Stream] = deque()
        self._starved: OrderedDict[int, H2Stream] = OrderedDict()  # streams that wait for the connection's window
        self._stalled: dict[int, H2Stream] = {}  # streams that wait for their own windows
        self._scheduled = False
        self._most_credit = 0  # an upper bound on the credit of the open streams
        self.window = DEFAULT_WINDOW
        """The connection's flow-control window: the bytes that may be sent on all streams together."""
        self.initial_window = DEFAULT_WINDOW
        """The initial window in the client's settings. A stream may send this number of bytes plus its ``credit``."""
        self.max_frame = MIN_FRAME_SIZE
        """Maximum payload of a frame, set by the client."""
        self.block_start = b""
        """The next header block must begin with these bytes."""
        self.corked = False
        """True if the caller is about to call ``flush``, so that no flush has to be scheduled."""
        self.paused = False
        """True while the socket's buffer is full."""
        self.written = 0
        """Number of bytes passed to the transport."""

    def open(self, transport: asyncio.Transport) -> None:
        """Start writing to ``transport``."""
        self._transport = transport

    def read(self) -> int:
        """A number that increases while the client reads messages. Other frames do not count."""
        transport = self._transport
        if transport is None:
            return 0
        return min(self._data_end, self.written - transport.get_write_buffer_size() - unacknowledged(transport))

    def control(self, frame: bytes) -> None:
        """Send ``frame``. Flow control does not apply."""
        self._frames.append(frame)
        self._bytes += len(frame)
        self._schedule()

    def headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """Send the header block ``block``, which must fit in one frame."""
        if self.block_start:
            block, self.block_start = self.block_start + block, b""
        size = len(block)
        self.control(HEADER.pack(size >> 8, size & 0xFF, HEADERS, flags | END_HEADERS, stream_id) + block)

    def ready(self, stream: H2Stream) -> None:
        """Queue ``stream``, which has something to send."""
        if not stream.is_ready:
            stream.is_ready = True
            if self._stalled:
                self._stalled.pop(stream.id, None)
            self._ready.append(stream)
            self._schedule()

    def widen(self, increment: int) -> None:
        """Enlarge the connection's window by ``increment`` bytes. Raises ConnectionFault."""
        check(self.window + increment <= MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
        self.window += increment
        if self._starved:
            self._schedule()

    def widen_stream(self, stream: H2Stream, increment: int) -> bool:
        """Enlarge the window of ``stream`` by ``increment`` bytes. Returns False if the window would become too large."""
        credit = stream.credit + increment
        if self.initial_window + credit > MAX_WINDOW:
            return False
        stream.credit = credit
        self._most_credit = max(self._most_credit, credit)
        if stream.unsent_bytes:
            self.ready(stream)
        return True

    def apply(self, settings: Mapping[int, int], streams: Mapping[int, H2Stream]) -> int:
        """Apply the client's settings. Returns the number of open ``streams`` that were visited. Raises ConnectionFault."""
        looked = 0
        if INITIAL_WINDOW_SIZE in settings:
            looked = self._set_initial_window(settings[INITIAL_WINDOW_SIZE], streams)
        self.max_frame = settings.get(MAX_FRAME_SIZE, self.max_frame)
        if settings.get(HEADER_TABLE_SIZE, DEFAULT_TABLE_SIZE) < DEFAULT_TABLE_SIZE:
            self.block_start = TABLE_SIZE_ZERO
        return looked

    def _set_initial_window(self, size: int, streams: Mapping[int, H2Stream]) -> int:
        """Apply the client's setting to all open ``streams`` (RFC 9113, section 6.9.2). Returns the number of visited streams.

        Windows are stored relative to the setting, so only streams that wait for their windows are visited. Raises ConnectionFault.
        """
        looked = 0
        if size + self._most_credit > MAX_WINDOW:
            # The stream that had the most credit may have ended.
            self._most_credit, looked = max((0, *(stream.credit for stream in streams.values()))), len(streams)
            is_allowed = size + self._most_credit <= MAX_WINDOW
            check(is_allowed, ErrorCode.FLOW_CONTROL_ERROR, "a window above 2^31 - 1")
        is_larger, self.initial_window = size > self.initial_window, size
        if is_larger and self._stalled:
            stalled, self._stalled = self._stalled, {}
            looked += len(stalled)
            for stream in stalled.values():
                self.ready(stream)
        return looked

    def forget(self, stream: H2Stream) -> None:
        """Drop ``stream``, which has been reset."""
        self._starved.pop(stream.id, None)
        self._stalled.pop(stream.id, None)

    def clear(self) -> None:
        """Drop all streams."""
        self._ready.clear()
        self._starved.clear()
        self._stalled.clear()

    def flush(self) -> None:  # noqa: PLR0912 - each call saved here counts
        """Write as much as the windows and the socket allow, but at most ``_FLUSH_BYTES`` bytes of ``FLUSH_STREAMS`` streams.

        The next event-loop iteration writes the rest.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            self._frames.clear()
            self._bytes = 0
            return
        ready, starved, left, turns = self._ready, self._starved, _FLUSH_BYTES, FLUSH_STREAMS
        while True:
            while self._bytes < _WRITE_BYTES and turns and not self.paused:
                turns -= 1
                if starved and self.window > 0:  # these streams have waited longest
                    stream = starved.popitem(last=False)[1]
                elif ready:
                    stream = ready.popleft()
                else:
                    break
                stream.is_ready = False
                if not stream.gone:
                    self._emit(stream)
            frames, size = self._frames, self._bytes
            if frames:
                self._frames, self._bytes = [], 0
                self.written += size
                left -= size
                if size <= _JOINED_BYTES or size < len(frames) * _JOINED_PART:
                    transport.write(b"".join(frames))
                else:
                    transport.writelines(frames)
            if self.paused or not (ready or (starved and self.window > 0)):
                break
            if left <= 0 or not turns:
                self._schedule()
                break
        unread = self._unread
        if unread.count or unread.reported:
            unread.settle()

    def close(self) -> None:
        """Drop all frames and streams, because the transport is closed."""
        self._transport = None
        self._on_sent = _ignore
        self.clear()
        self._frames.clear()

    def _schedule(self) -> None:
        if not (self.corked or self._scheduled):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._scheduled = False
        self.flush()

    def _emit(self, stream: H2Stream) -> None:
        size = stream.unsent_bytes
        if (
            stream.finished
            and not stream.started
            and len(stream.unsent) == 1
            and stream.trailers is OK_TRAILERS
            and not self.block_start
            and size <= self.window
            and size <= self.initial_window + stream.credit
            and size <= self.max_frame
        ):
            self._emit_answer(stream, size)
        elif self._emit_messages(stream) and stream.finished:
            self.headers(stream.id, stream.trailers if stream.started else RESPONSE + stream.trailers, END_STREAM)
            stream.gone = True
            self._on_sent(stream)

    def _emit_answer(self, stream: H2Stream, size: int) -> None:
        """Fast path for the common case: one message that fits in one frame and in the windows."""
        stream_id = stream.id
        start = _ANSWER.pack(_RESPONSE_START, stream_id, RESPONSE, size >> 8, size & 0xFF, DATA, stream_id)
        self._frames += (start, *stream.unsent.pop()[1], _OK.pack(_OK_START, stream_id, OK_TRAILERS))
        self.window -= size
        self._bytes += size + _AROUND_BYTES
        stream.gone = True
        self._on_sent(stream)

    def _emit_messages(self, stream: H2Stream) -> bool:
        """Send as many bytes of ``stream`` as the windows and its turn allow. Returns True if no bytes are left."""
        turn = _TURN_BYTES
        while stream.unsent:
            room = min(self.window, self.initial_window + stream.credit)
            if room <= 0 or turn <= 0:
                if room > 0:
                    stream.is_ready = True
                    self._ready.append(stream)
                elif self.window <= 0:
                    stream.is_ready = True
                    self._starved[stream.id] = stream
                else:
                    self._stalled[stream.id] = stream
                return False
            if not stream.started:
                stream.started = True
                self.headers(stream.id, RESPONSE, 0)
            first = len(stream.unsent[stream.first][1][0])
            if first > self.max_frame:
                size = min(room, turn, first)
                (part,) = stream.take(size)
                self._cut(stream.id, part, size)
            else:
                size = min(room, turn, self.max_frame, stream.unsent_bytes)
                self._frames.append(HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream.id))
                self._frames += stream.take(size)
                self._bytes += HEADER.size
            self._bytes += size
            self._data_end = self.written + self._bytes
            self.window -= size
            stream.credit -= size
            turn -= size
        return True

    def _cut(self, stream_id: int, part: Buffer, size: int) -> None:
        """Send ``part``, which has ``size`` bytes, in frames of the maximum size that the client allows."""
        frames, most = self._frames, self.max_frame
        head, view = HEADER.pack(most >> 8, most & 0xFF, DATA, 0, stream_id), memoryview(part)
        for start in range(0, size - most + 1, most):
            frames += (head, view[start : start + most])
        rest = size % most
        if rest:
            frames += (HEADER.pack(rest >> 8, rest & 0xFF, DATA, 0, stream_id), view[size - rest :])
        self._bytes += HEADER.size * -(-size // most)
