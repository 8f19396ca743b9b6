"""HTTP/2 frames (RFC 9113, sections 4, 6 and 7) and protocol errors, shared by the server and the load generator."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum

DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

HEADER = struct.Struct(">HBBBI")
"""A frame header: length (upper 16 bits, lower 8 bits), type, flags, stream."""
SETTING = struct.Struct(">HI")
UINT32 = struct.Struct(">I")
GOAWAY_HEAD = struct.Struct(">II")

MAX_STREAM_ID = MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65535
DEFAULT_TABLE_SIZE = 4096
MIN_FRAME_SIZE = 1 << 14
MAX_FRAME_SIZE_LIMIT = (1 << 24) - 1

SETTINGS_ACK = HEADER.pack(0, 0, SETTINGS, ACK, 0)


class ErrorCode(IntEnum):
    """Error codes (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """An error that closes the connection, with GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFault(Exception):
    """An error that closes one stream, with RST_STREAM."""

    def __init__(self, stream_id: int, code: ErrorCode) -> None:
        super().__init__(f"stream {stream_id}: {code.name}")
        self.stream_id = stream_id
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame; ``payload`` must have less than 2**24 bytes."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame; ``values`` maps identifiers of settings to values."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*each) for each in values.items()))


def ping(payload: bytes, flags: int = 0) -> bytes:
    """A PING frame. With the flag ``ACK``, it answers a PING. ``payload`` must have 8 bytes."""
    return frame(PING, flags, 0, payload)


def goaway(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """A GOAWAY frame. The sender still answers the streams up to ``last_stream_id``."""
    return frame(GOAWAY, 0, 0, GOAWAY_HEAD.pack(last_stream_id, code) + reason.encode())


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, UINT32.pack(code))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame for a stream, or for the connection if ``stream_id`` is 0."""
    return frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(increment))


def without_padding(payload: bytes, flags: int) -> bytes:
    """The header block of a HEADERS frame, without padding and priority. Raises ConnectionFault."""
    start, stop = 0, len(payload)
    if flags & PADDED:
        if not stop:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
        start, stop = 1, stop - payload[0]
    if flags & PRIORITISED:
        start += 5
    if start > stop:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding or priority longer than the frame")
    return payload[start:stop]


def dependency(payload: bytes, flags: int = 0) -> int:
    """The stream dependency of a PRIORITY frame, or of a HEADERS frame with the flag ``PRIORITISED``; 0 means none."""
    start = 1 if flags & PADDED else 0
    return int.from_bytes(payload[start : start + 4]) & MAX_STREAM_ID


def parse_window_update(payload: bytes) -> int:
    """The increment of a WINDOW_UPDATE frame. Raises ConnectionFault."""
    check(len(payload) == 4, ErrorCode.FRAME_SIZE_ERROR, f"a WINDOW_UPDATE of {len(payload)} bytes")
    increment: int = UINT32.unpack(payload)[0]
    return increment & MAX_WINDOW


def priority_fault(stream_id: int, payload: bytes) -> ErrorCode | None:
    """The error in a PRIORITY frame for ``stream_id``; None if the frame is valid."""
    if len(payload) != 5:
        return ErrorCode.FRAME_SIZE_ERROR
    return ErrorCode.PROTOCOL_ERROR if dependency(payload) == stream_id else None


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """Identifiers and values of SETTINGS. Raises ConnectionFault for an invalid value of a known setting."""
    check(len(payload) % SETTING.size == 0, ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with an invalid length")
    values = list(SETTING.iter_unpack(payload))
    for name, value in values:
        if name == INITIAL_WINDOW_SIZE:
            check(value <= MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR, "an initial window above 2^31 - 1")
        elif name == MAX_FRAME_SIZE:
            is_allowed = MIN_FRAME_SIZE <= value <= MAX_FRAME_SIZE_LIMIT
            check(is_allowed, ErrorCode.PROTOCOL_ERROR, "a maximum frame size out of bounds")
        elif name == ENABLE_PUSH:
            check(value <= 1, ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH that is neither 0 nor 1")
    return values


def check(is_so: bool, code: ErrorCode, otherwise: str) -> None:
    """Raise ConnectionFault with the message ``otherwise`` if ``is_so`` is false."""
    if not is_so:
        raise ConnectionFault(code, otherwise)
