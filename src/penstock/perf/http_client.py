"""A minimal HTTP/1.1 client for generating load. It sends complete requests as bytes, and parses only the status and the sizes of
responses.

``HttpConnection`` is the hot path, without a task, future or timer per request. ``HttpSession`` awaits each response.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from penstock.errors import DeadlineExceeded, InvalidArgument, Unavailable, Unsupported

_MAX_HEAD_BYTES = 65536
_MAX_DIGITS = 20

MAX_ANSWER_BYTES = 1 << 30
"""Maximum size of a response, so that no server can fill the client's memory."""

DROPPED = "connection dropped"
TOO_LARGE = "the answer is too large"
UNREADABLE = "unreadable answer"
_PORTS = {"http": 80, "https": 443}


class Address(msgspec.Struct, frozen=True):
    """Host and port of an HTTP server, with the TLS settings and the key for connections to it."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    """TLS settings; None for unencrypted connections."""
    key: str = ""
    """API key that every request sends in ``Authorization``; empty for none."""

    @classmethod
    def parse(cls, url: str, ca: Path | None = None, key: str = "") -> Address:
        """Parse ``http[s]://host[:port]``. The default port is 80 for http and 443 for https.

        ``ca`` is a PEM file of certificates to trust instead of the system's. Raises InvalidArgument.
        """
        hint = "give scheme, host and port, e.g. http://127.0.0.1:8000"
        if not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgument(
                "the key contains spaces, control characters or characters outside ASCII", "check the key"
            )
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidArgument(f"bad URL '{url}': {error}", hint) from None
        if parts.scheme not in _PORTS:
            raise InvalidArgument(f"bad URL '{url}': the scheme must be http or https", hint)
        if not host or any(mark.isspace() for mark in url):
            raise InvalidArgument(f"bad URL '{url}': the host is missing", hint)
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise InvalidArgument(f"bad URL '{url}': only scheme, host and port are allowed", hint)
        tls = _trusting(ca) if parts.scheme == "https" else None
        return cls(host, _PORTS[parts.scheme] if port is None else port, tls, key)

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def fields(self) -> str:
        """The header lines that every request needs."""
        return f"Host: {self.authority}\r\n" + (f"Authorization: Bearer {self.key}\r\n" if self.key else "")

    @property
    def authority(self) -> str:
        """``host:port`` as in the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}"


def _trusting(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # includes SSLError
        raise InvalidArgument(
            f"cannot read certificates from '{ca}': {error.strerror or error}", "give a PEM file"
        ) from None


class AnswerHead(NamedTuple):
    """The parsed head of a response. ``json_size`` is the value of the header Inference-Header-Content-Length, if present."""

    status: int
    """200 if the request succeeded, otherwise the HTTP or gRPC status, depending on ``protocol``."""
    content_length: int
    json_size: int | None
    close: bool
    protocol: str = "HTTP"


# The heads of a server's responses differ mostly in their Content-Length, so the cache has a high hit rate.
@functools.lru_cache(maxsize=1024)
def parse_head(head: bytes) -> AnswerHead:
    """Parse a status line and header lines, without the empty line. Raises Unsupported if the head is invalid or lacks a length."""
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length, json_size = fields.get(b"content-length", b""), fields.get(b"inference-header-content-length")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise Unsupported("the response is not HTTP/1.1")
    if not _is_size(length) or not (json_size is None or _is_size(json_size)):
        raise Unsupported("the response has no valid Content-Length", "chunked responses are not supported")
    wish = fields.get(b"connection", b"").lower()
    close = wish == b"close" or (version == b"HTTP/1.0" and wish != b"keep-alive")
    return AnswerHead(int(status), int(length), None if json_size is None else int(json_size), close)


def _is_size(text: bytes) -> bool:
    return text.isdigit() and len(text) < _MAX_DIGITS


OnAnswer = Callable[["HttpConnection", AnswerHead], None]
OnLost = Callable[["HttpConnection", str], None]


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection with at most one request in flight.

    The connection calls ``on_answer(connection, head)`` when a response is complete. This callback may send the next request. The
    connection calls ``on_lost(connection, why)`` once, when it is closed; ``busy`` is then True if a request was lost.
    ``started``, ``sent`` and ``index`` describe the request in flight.
    """

    __slots__ = (
        "_body_at", "_data", "_expected", "_lost_because", "_max_bytes", "_on_answer", "_on_lost", "_partial", "_transport",
        "busy", "index", "sent", "started",
    )  # fmt: skip

    def __init__(self, on_answer: OnAnswer, on_lost: OnLost, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.busy = False
        self._max_bytes = max_bytes
        self.started = self.sent = 0.0
        self.index = 0
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._partial = bytearray()
        self._expected = 0
        self._data = b""
        self._body_at = 0
        self._lost_because = DROPPED

    def send(self, request: bytes, index: int, started: float, now: float) -> None:
        """Send a complete request. The times are ``time.perf_counter`` seconds."""
        self.busy = True
        self.index = index
        self.started = started
        self.sent = now
        self._transport.write(request)

    def body(self) -> bytes:
        """The body of the response. Valid only within ``on_answer``."""
        return self._data[self._body_at :]

    def drop(self, why: str) -> None:
        """Abort the connection. ``on_lost`` is then called with ``why``."""
        self._lost_because = why
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._expected:
                return
            data = bytes(self._partial)
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._wait_for_more(data, 0)
            return
        try:
            head = parse_head(data[:end])
        except Unsupported:
            self.drop(UNREADABLE)
            return
        size = end + 4 + head.content_length
        if head.content_length > self._max_bytes:
            self.drop(TOO_LARGE)
            return
        if len(data) < size:
            self._wait_for_more(data, size)
            return
        if len(data) > size or not self.busy:
            self.drop(UNREADABLE)  # more than one response
            return
        if self._partial:
            self._partial = bytearray()
            self._expected = 0
        self._data = data
        self._body_at = end + 4
        self.busy = False
        self._on_answer(self, head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self, self._lost_because)

    def _wait_for_more(self, data: bytes, expected: int) -> None:
        if not expected and len(data) > _MAX_HEAD_BYTES:
            self.drop(UNREADABLE)
            return
        if len(self._partial) != len(data):
            self._partial = bytearray(data)
        self._expected = expected


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    json_size: int | None


class HttpSession:
    """Sends one request at a time and awaits its response. Reconnects if the server has closed the connection."""

    def __init__(self, address: Address, timeout_s: float = 30.0, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._connection: HttpConnection | None = None
        self._answer: asyncio.Future[HttpAnswer]

    async def ask(self, request: bytes) -> HttpAnswer:
        """Send a complete request and await the response. Raises Unavailable if the connection fails, and DeadlineExceeded after the
        timeout.
        """
        self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    self._connection = await connect(self._address, self._on_answer, self._on_lost, self._max_bytes)
                self._connection.send(request, 0, 0.0, 0.0)
                return await self._answer
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(
                f"{self._address.url} did not answer within {self._timeout_s:g} s",
                "check that the server is not overloaded",
            ) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.drop(DROPPED)
            self._connection = None

    def _on_answer(self, connection: HttpConnection, head: AnswerHead) -> None:
        if not self._answer.done():
            self._answer.set_result(HttpAnswer(head.status, connection.body(), head.json_size))
        if head.close:
            self.close()

    def _on_lost(self, connection: HttpConnection, why: str) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        if connection.busy and not self._answer.done():
            hint = (
                "check that it speaks HTTP/1.1 with a Content-Length" if why == UNREADABLE else "see the server's log"
            )
            self._answer.set_exception(Unavailable(f"no answer from {self._address.url}: {why}", hint))


TLS_HINT = (
    "use the scheme of the server; trust its certificate with --ca FILE, and use a name that the certificate contains"
)


def tls_reason(error: ssl.SSLError) -> str:
    """The cause of a failed handshake."""
    return getattr(error, "verify_message", "") or error.reason or str(error)


async def connect(
    address: Address, on_answer: OnAnswer, on_lost: OnLost, max_bytes: int = MAX_ANSWER_BYTES
) -> HttpConnection:
    """Open a connection. Raises Unavailable if no server listens at ``address``."""
    loop = asyncio.get_running_loop()
    try:
        _, connection = await loop.create_connection(
            lambda: HttpConnection(on_answer, on_lost, max_bytes), address.host, address.port, ssl=address.tls
        )
    except ssl.SSLError as error:
        raise Unavailable(f"cannot connect to {address.url}: {tls_reason(error)}", TLS_HINT) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(
            f"cannot connect to {address.url}: {reason}", "start the server there: penstock serve MODEL"
        ) from None
    return connection
