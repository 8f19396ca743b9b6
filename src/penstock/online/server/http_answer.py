"""HTTP answers as bytes. Pure."""

from __future__ import annotations

_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
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


def compose(status: int, headers: bytes, connection: bytes, body: bytes) -> bytes:
    """A whole answer. ``headers`` are lines with their ends; ``connection`` is ``CLOSE``, ``KEEP_ALIVE`` or nothing."""
    return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (_STATUS_LINES[status], headers, connection, len(body), body)
