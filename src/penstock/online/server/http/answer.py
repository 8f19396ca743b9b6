"""HTTP answers as bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.tensor import Buffer

_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}
_STATUS_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, reason) for status, reason in _REASONS.items()}

JSON = b"Content-Type: application/json\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = b"Connection: close\r\n"
KEEP_ALIVE = b"Connection: keep-alive\r\n"

LAST_CHUNK = b"0\r\n\r\n"

_JOINED_BYTES = 64 << 10

Answer = bytes | list[Buffer]
"""In one piece, or in parts where joining them would copy much."""


def compose(status: int, headers: bytes, connection: bytes, body: bytes, tensors: Sequence[Buffer] = ()) -> Answer:
    """A whole answer, ``tensors`` behind ``body``.

    ``headers`` are lines with their ends; ``connection`` is ``CLOSE``, ``KEEP_ALIVE`` or nothing.
    """
    if not tensors:
        return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (_STATUS_LINES[status], headers, connection, len(body), body)
    size = len(body)
    for tensor in tensors:
        size += len(tensor)
    start = b"%b%b%bContent-Length: %d\r\n\r\n%b" % (_STATUS_LINES[status], headers, connection, size, body)
    if size <= _JOINED_BYTES:
        return b"".join((start, *tensors))
    return [start, *tensors]


def compose_stream(headers: bytes, connection: bytes, is_chunked: bool) -> bytes:
    """The head of an answer of unknown length; without chunks it ends with the connection."""
    framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
    return b"%b%b%b%b\r\n" % (_STATUS_LINES[200], headers, connection, framing)


def compose_chunk(data: bytes) -> bytes:
    """One chunk, not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)
