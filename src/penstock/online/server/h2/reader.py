"""Walks the HTTP/2 frames of what a client sends, cut into pieces anywhere, and calls a handler with what they carry.

DATA are handed on as they come, so that a large frame is never waited for; other frames are small, or refused. A header
block over several frames is put together, bounded in size.
"""

from __future__ import annotations

from typing import Protocol

from penstock.online.server.h2.guard import FloodGuard
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode, StreamFault

_HEADERS_FLAGS = h2.END_HEADERS | h2.PADDED | h2.PRIORITISED


class FrameHandler(Protocol):
    """What a connection does with frames. Each may raise ConnectionFault, or StreamFault, which comes back to ``on_fault``."""

    def on_data(self, stream_id: int, size: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """A DATA frame that counts ``size`` bytes of the windows, whose content begins with ``data[start:stop]``."""

    def on_more_data(self, stream_id: int, ended: bool, data: bytes, start: int, stop: int) -> None:
        """More of the last DATA frame; it is on ``stream_id``."""

    def on_written(self, stream_id: int, ended: bool, count: int) -> None:
        """More of the last DATA frame, which is where it belongs already."""

    def on_headers(self, stream_id: int, ended: bool, block: bytes) -> None:
        """A whole header block."""

    def on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Any other frame, of whatever kind."""

    def on_fault(self, fault: StreamFault) -> None:
        """One stream has to end."""


class FrameReader:
    """One connection's receiving end. Not to be fed any more after it raised."""

    __slots__ = (
        "_block",
        "_block_ended",
        "_block_stream",
        "_data_ended",
        "_data_left",
        "_data_stream",
        "_guard",
        "_handler",
        "_max_control",
        "_max_frame",
        "_padding_left",
        "_rest",
        "_unusual",
        "is_greeted",
        "progress",
    )

    def __init__(self, handler: FrameHandler, guard: FloodGuard, max_frame: int, max_control: int) -> None:
        self._handler = handler
        self._guard = guard
        self._max_frame = max_frame
        self._max_control = max_control
        self._rest = b""
        self._unusual = True  # only one kind of frame may come next: the first SETTINGS, or CONTINUATION
        self._block = b""
        self._block_stream = 0
        self._block_ended = False
        self._data_left = self._padding_left = 0
        self._data_stream = 0
        self._data_ended = False
        self.is_greeted = False
        """Whether the client has said who it is."""
        self.progress = 0
        """Grows whenever something was received completely."""

    @property
    def is_waiting(self) -> bool:
        """Whether something has been received that is of no use before the rest of it comes."""
        return bool(self._rest) or self._unusual

    @property
    def missing(self) -> int:
        """Bytes of a DATA frame that have not come yet, if nothing else is between them and the end of the frame."""
        return 0 if self._padding_left else self._data_left

    @property
    def stream_id(self) -> int:
        """The stream of the last DATA frame that did not come in whole."""
        return self._data_stream

    def skip(self, count: int) -> None:
        """``count`` of the bytes that are ``missing`` have been written to where the handler wants them. Raises ConnectionFault."""
        self._data_left -= count
        try:
            ended = self._data_ended and not self._data_left
            self._handler.on_written(self._data_stream, ended, count)
        except StreamFault as fault:
            self._handler.on_fault(fault)

    def feed(self, data: bytes) -> None:
        """Take what comes next. Raises ConnectionFault."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        position = 0
        if not self.is_greeted:
            if not data.startswith(PREFACE[: len(data)]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
            if len(data) < len(PREFACE):
                self._rest = data
                return
            self.is_greeted = True
            position = len(PREFACE)
        if self._data_left or self._padding_left:
            position = self._more_data(data, position)
        position = self._walk(data, position)
        if position and not self._unusual:
            self.progress += 1
        self._rest = data[position:]

    def _walk(self, data: bytes, position: int) -> int:  # noqa: PLR0912 - each call saved here counts
        """Handle all frames from ``position`` on that are whole, or of DATA; returns where they end."""
        handler, unpack, end = self._handler, h2.HEADER.unpack_from, len(data)
        while end - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            stream_id &= h2.MAX_STREAM_ID
            size = high << 8 | low
            start = position + 9
            stop = start + size
            if size > self._max_frame:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            try:
                if self._unusual:
                    self._check_order(kind, flags, stream_id)
                if kind == h2.DATA:
                    if stop <= end and not flags & h2.PADDED:
                        position = stop
                        handler.on_data(stream_id, size, bool(flags & h2.END_STREAM), data, start, stop)
                    elif flags & h2.PADDED and size and start == end:
                        break  # not even the length of the padding is there
                    else:
                        position = min(stop, end)
                        self._data(flags, stream_id, size, data, start, position)
                    continue
                if stop > end:
                    if size > self._max_control:
                        raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} with {size} bytes")
                    break
                position = stop
                if kind == h2.HEADERS and flags & _HEADERS_FLAGS == h2.END_HEADERS and stream_id:
                    handler.on_headers(stream_id, bool(flags & h2.END_STREAM), data[start:stop])
                elif kind in (h2.HEADERS, h2.CONTINUATION):
                    self._headers(kind, flags, stream_id, data[start:stop])
                else:
                    handler.on_control(kind, flags, stream_id, data[start:stop])
            except StreamFault as fault:
                handler.on_fault(fault)
        return position

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        if self._block_stream:
            if kind != h2.CONTINUATION or stream_id != self._block_stream:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame within a header block")
        elif kind != h2.SETTINGS or flags & h2.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        else:
            self._unusual = False

    def _headers(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            if stream_id == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "headers on stream 0")
            if flags & (h2.PADDED | h2.PRIORITISED):
                payload = h2.without_padding(payload, flags)
            ended = bool(flags & h2.END_STREAM)
            if flags & h2.END_HEADERS:
                self._handler.on_headers(stream_id, ended, payload)
                return
            self._block, self._block_stream, self._block_ended, self._unusual = payload, stream_id, ended, True
            return
        if not self._block_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a continuation of nothing")
        self._guard.charge()
        self._block += payload
        if len(self._block) > self._max_control:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the headers are larger than they may be")
        if flags & h2.END_HEADERS:
            block, self._block = self._block, b""
            self._block_stream, self._unusual = 0, False
            self._handler.on_headers(stream_id, self._block_ended, block)

    def _data(self, flags: int, stream_id: int, size: int, data: bytes, start: int, stop: int) -> None:
        """A DATA frame that is padded, or of which more will come."""
        left, padding = size - (stop - start), 0
        if flags & h2.PADDED:
            if not size:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
            padding = data[start]
            start += 1
            if padding >= size:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding that exceeds its frame")
        content = size - padding - (1 if flags & h2.PADDED else 0)
        middle = min(stop, start + content)
        self._data_stream = stream_id
        self._data_ended = bool(flags & h2.END_STREAM)
        self._data_left = content - (middle - start)
        self._padding_left = left - self._data_left
        self._handler.on_data(stream_id, size, self._data_ended and not self._data_left, data, start, middle)

    def _more_data(self, data: bytes, start: int) -> int:
        """Hand on more of a frame that has begun; returns where that ends."""
        middle = min(len(data), start + self._data_left)
        if self._data_left:
            self._data_left -= middle - start
            ended = self._data_ended and not self._data_left
            try:
                self._handler.on_more_data(self._data_stream, ended, data, start, middle)
            except StreamFault as fault:
                self._handler.on_fault(fault)
        stop = min(len(data), middle + self._padding_left) if not self._data_left else middle
        self._padding_left -= stop - middle
        return stop
