"""Splits the bytes that an HTTP/2 client sends into frames for the session. The bytes may arrive in pieces of any size.

The content of DATA frames is passed on as it arrives. All other frames are passed on when they are complete. The size of these
frames, and of a header block in several frames, is therefore limited.
"""

from __future__ import annotations

from penstock.online.server.h2.session import H2Session
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_STREAM_ID,
    PADDED,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)

_HEADERS_FLAGS = h2.END_HEADERS | h2.PADDED | h2.PRIORITISED


class FrameReader:
    """Reads one connection. After an exception, do not call ``feed`` again."""

    __slots__ = (
        "_block",
        "_block_ended",
        "_block_stream",
        "_calls",
        "_data_ended",
        "_data_left",
        "_data_stream",
        "_guard",
        "_is_greeted",
        "_max_control",
        "_max_frame",
        "_padding_left",
        "_rest",
        "_session",
        "_start",
        "_unusual",
        "is_behind",
        "progress",
    )

    def __init__(self, session: H2Session, max_frame: int, max_control: int) -> None:
        self._session = session
        self._guard, self._calls = session.guard, session.calls
        self._max_frame = max_frame
        self._max_control = max_control
        self._rest = b""
        self._start = 0  # where the unprocessed bytes in ``_rest`` start
        self._unusual = True  # only SETTINGS (the first frame) or CONTINUATION may follow
        self._block = bytearray()
        self._block_stream = 0
        self._block_ended = False
        self._data_left = self._padding_left = 0
        self._data_stream = 0
        self._data_ended = False
        self._is_greeted = False  # the client's preface has arrived
        self.is_behind = False
        """True if the session ran out of units before all received data was processed."""
        self.progress = 0
        """Increases with each complete frame."""

    @property
    def is_waiting(self) -> bool:
        """True if the client has sent an incomplete preface, frame or header block."""
        return not self.is_behind and (bool(self._rest) or self._unusual)

    @property
    def missing(self) -> int:
        """Number of missing bytes of the last DATA frame; 0 if the frame has padding."""
        return 0 if self._padding_left else self._data_left

    @property
    def stream_id(self) -> int:
        """The id of the stream of the last incomplete DATA frame."""
        return self._data_stream

    def skip(self, count: int) -> None:
        """Process ``count`` missing bytes that were written to the session's memory. Raises ConnectionFault."""
        self._data_left -= count
        try:
            ended = self._data_ended and not self._data_left
            self._session.on_written(self._data_stream, ended, count)
        except StreamFault as fault:
            self._session.on_fault(fault)

    def close(self) -> None:
        """Drop the unprocessed bytes."""
        self._rest, self._block = b"", bytearray()
        self.is_behind = False

    def feed(self, data: bytes) -> None:
        """Process the next bytes while the session has units. Raises ConnectionFault."""
        self._rest = self._rest[self._start :] + data if self._rest else data
        self._start = 0
        self.go_on()

    def go_on(self) -> None:
        """Process bytes that an earlier call left unprocessed. Raises ConnectionFault."""
        data, position = self._rest, self._start
        if not self._is_greeted:
            is_preface = data.startswith(PREFACE[: len(data)])
            h2.check(is_preface, ErrorCode.PROTOCOL_ERROR, "the client did not send the HTTP/2 preface")
            if len(data) < len(PREFACE):
                return
            self._is_greeted = True
            position = len(PREFACE)
        if self._data_left or self._padding_left:
            position = self._more_data(data, position)
        position = self._walk(data, position)
        if position > self._start and not self._unusual:
            self.progress += 1
        self.is_behind = self._calls.units <= 0 and position < len(data)
        if self.is_behind:
            self._start = position  # avoids a copy, because many turns may follow
        else:
            self._rest, self._start = data[position:], 0

    def _walk(self, data: bytes, position: int) -> int:  # noqa: PLR0912 - each call saved here counts
        """Process frames from ``position`` on, of which only DATA frames may be incomplete, and return their end."""
        session, calls, unpack, end, frames = self._session, self._calls, h2.HEADER.unpack_from, len(data), 0
        while end - position >= 9 and calls.units > frames:
            frames += 1
            high, low, kind, flags, stream_id = unpack(data, position)
            stream_id &= MAX_STREAM_ID
            size = high << 8 | low
            start = position + 9
            stop = start + size
            if size > self._max_frame:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes exceeds the maximum of {self._max_frame}"
                )
            try:
                if self._unusual:
                    self._check_order(kind, flags, stream_id)
                if kind == DATA:
                    if stop <= end and not flags & PADDED:
                        position = stop
                        session.on_data(stream_id, size, flags & END_STREAM != 0, data, start, stop)
                    elif flags & PADDED and size and start == end:
                        break  # the byte with the length of the padding is missing
                    else:
                        position = min(stop, end)
                        self._data(flags, stream_id, size, data, start, position)
                    continue
                if stop > end:
                    if size > self._max_control:
                        raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} with {size} bytes")
                    break
                position = stop
                if kind == HEADERS and flags & _HEADERS_FLAGS == END_HEADERS and stream_id:
                    session.on_headers(stream_id, flags & END_STREAM != 0, data[start:stop])
                elif kind in (HEADERS, CONTINUATION):
                    self._headers(kind, flags, stream_id, data[start:stop])
                else:
                    session.on_control(kind, flags, stream_id, data[start:stop])
            except StreamFault as fault:
                session.on_fault(fault)
        calls.units -= frames
        return position

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._block_stream:
            if kind != h2.CONTINUATION or stream_id != self._block_stream:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
        elif kind != h2.SETTINGS or flags & h2.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        else:
            self._unusual = False

    def _headers(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            h2.check(stream_id != 0, ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
            depends_on = h2.dependency(payload, flags) if flags & h2.PRIORITISED else 0
            if flags & (h2.PADDED | h2.PRIORITISED):
                payload = h2.without_padding(payload, flags)
            ended = bool(flags & h2.END_STREAM)
            if flags & h2.END_HEADERS:
                self._session.on_headers(stream_id, ended, payload)
                if depends_on == stream_id:
                    raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
            self._block, self._block_stream, self._block_ended, self._unusual = (
                bytearray(payload),
                stream_id,
                ended,
                True,
            )
            return
        h2.check(self._block_stream != 0, ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._guard.charge()
        self._block += payload
        h2.check(len(self._block) <= self._max_control, ErrorCode.ENHANCE_YOUR_CALM, "the headers exceed the limit")
        if flags & h2.END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self._block_stream, self._unusual = 0, False
            self._session.on_headers(stream_id, self._block_ended, block)

    def _data(self, flags: int, stream_id: int, size: int, data: bytes, start: int, stop: int) -> None:
        """Process a DATA frame that is padded or incomplete."""
        left, padding = size - (stop - start), 0
        if flags & h2.PADDED:
            h2.check(size > 0, ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
            padding = data[start]
            start += 1
            h2.check(padding < size, ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
        content = size - padding - (1 if flags & h2.PADDED else 0)
        middle = min(stop, start + content)
        self._data_stream = stream_id
        self._data_ended = bool(flags & h2.END_STREAM)
        self._data_left = content - (middle - start)
        self._padding_left = left - self._data_left
        self._session.on_data(stream_id, size, self._data_ended and not self._data_left, data, start, middle)

    def _more_data(self, data: bytes, start: int) -> int:
        """Pass on further bytes of an incomplete DATA frame. Returns where they end."""
        middle = min(len(data), start + self._data_left)
        if self._data_left:
            self._data_left -= middle - start
            ended = self._data_ended and not self._data_left
            try:
                self._session.on_more_data(self._data_stream, ended, data, start, middle)
            except StreamFault as fault:
                self._session.on_fault(fault)
        stop = min(len(data), middle + self._padding_left) if not self._data_left else middle
        self._padding_left -= stop - middle
        return stop
