"""HTTP/1.1 responses as bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from penstock.tensor import Buffer

_REASONS = {status: status.phrase for status in HTTPStatus} | {413: "Content Too Large"}
_STATUS_LINES = {status: f"HTTP/1.1 {status:d} {reason}\r\n".encode() for status, reason in _REASONS.items()}

JSON = b"Content-Type: application/json\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = b"Connection: close\r\n"
KEEP_ALIVE = b"Connection: keep-alive\r\n"

LAST_CHUNK = b"0\r\n\r\n"

_JOINED_BYTES = 64 << 10

Answer = bytes | list[Buffer]
"""A response: one piece, or several pieces if joining them would copy large tensors."""


def compose(status: int, headers: bytes, connection: bytes, body: bytes, tensors: Sequence[Buffer] = ()) -> Answer:
    """A complete response with ``body`` followed by ``tensors``.

    Each line of ``headers`` ends with CRLF. ``connection`` is ``CLOSE``, ``KEEP_ALIVE`` or empty.
    """
    if not tensors and len(body) <= _JOINED_BYTES:
        return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (_STATUS_LINES[status], headers, connection, len(body), body)
    size = len(body)
    for tensor in tensors:
        size += len(tensor)
    start = b"%b%b%bContent-Length: %d\r\n\r\n" % (_STATUS_LINES[status], headers, connection, size)
    if size <= _JOINED_BYTES:
        return b"".join((start, body, *tensors))
    if len(body) <= _JOINED_BYTES:
        return [start + body, *tensors]
    return [start, body, *tensors]


def compose_small(status: int, headers: bytes, body: bytes) -> bytes:
    """Like ``compose``, for a small body on a connection that stays open."""
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (_STATUS_LINES[status], headers, len(body), body)


def without_body(answer: Answer) -> bytes:
    """The head of ``answer``, as the response to HEAD. ``Content-Length`` remains the size of the body."""
    head, end, _ = (answer if isinstance(answer, bytes) else bytes(answer[0])).partition(b"\r\n\r\n")
    return head + end


def compose_stream(headers: bytes, connection: bytes, is_chunked: bool) -> bytes:
    """The head of a response of unknown length. A response that is not chunked ends when the connection closes."""
    framing = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
    return b"%b%b%b%b\r\n" % (_STATUS_LINES[200], headers, connection, framing)


def compose_chunk(data: bytes) -> bytes:
    """``data``, which must not be empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
