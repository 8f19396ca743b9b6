"""The parsed head of an HTTP request: request line and headers.

Clients send the same head again and again. The server therefore caches parsed heads by their bytes.
"""

from __future__ import annotations

import re

import msgspec

from penstock.errors import InvalidArgument, Unsupported, quoted
from penstock.online.server.access.auth import credential
from penstock.online.server.access.web import Sender, WebAccess
from penstock.online.server.http.compression import preferred, weights
from penstock.online.server.http.routes import NOWHERE, Handler, Route
from penstock.online.server.request_layout import BoundedCache

_MAX_DIGITS = 18
_LENGTHS = frozenset({4, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17, 29, 31})
"""Lengths of the names of the headers that are read. Most other headers can be skipped because their names have other lengths."""
_AUTHORITY_END = re.compile(rb"[/?#]")
_VERSIONS = ("1.1", "1.0")
_SINGLE = frozenset(
    (
        b"inference-header-content-length",
        b"content-type",
        b"authorization",
        b"x-api-key",
        b"origin",
        b"sec-fetch-site",
        b"sec-fetch-mode",
    )
)
"""Headers that must not be repeated, because two parsers may interpret the repetition differently."""

MAX_KNOWN_BYTES = 2048
"""Longer heads are not cached."""


class RequestHead(msgspec.Struct, gc=False):
    """The parsed fields of one head. Requests with the same head bytes share one complete object."""

    method: bytes = b""
    route: Route = NOWHERE
    handler: Handler | None = None
    """The handler of ``route`` for ``method``."""
    keep_alive: bool = True
    http_1_0: bool = False
    body_bytes: int = 0
    json_length: int | None = None
    """The value of ``Inference-Header-Content-Length``."""
    encoding: bytes = b""
    """``Content-Encoding`` in lower case; empty for identity. Several encodings are joined by commas."""
    transfer: bytes = b""
    """``Transfer-Encoding`` in lower case. Several codings are joined by commas."""
    content_type: bytes = b""
    accepted: bytes = b""
    """The preferred encoding of ``Accept-Encoding``; empty for identity."""
    prefers_html: bool = False
    """True if ``Accept`` names HTML with a greater weight than JSON, as browsers do for pages."""
    credential: bytes | None = None
    """The key in ``Authorization`` or ``X-API-Key``."""
    keys: dict[str, bytes] = {}
    """Headers that give access to restricted parts of the API, by name in lower case."""
    traceparent: str = ""
    tracestate: str = ""
    single: frozenset[bytes] = frozenset()
    """Names of the headers that have been read and may occur only once."""
    sender: Sender = msgspec.field(default_factory=Sender)
    cors: bytes = b""
    """CORS header lines of every response, including errors."""
    is_usual: bool = False
    """True if responses have no CORS headers, and the request is neither HEAD nor HTTP/1.0."""

    def read(self, name: bytes, value: bytes) -> None:
        """Read one header. Unknown headers are ignored. Raises InvalidArgument."""
        if len(name) not in _LENGTHS:
            return
        name = name.lower()
        self._check_single(name)
        match name:
            case b"inference-header-content-length":
                if not value.isdigit() or len(value) > _MAX_DIGITS:
                    raise InvalidArgument("header Inference-Header-Content-Length is not a number of bytes")
                self.json_length = int(value)
            case b"content-encoding" | b"transfer-encoding":
                self._read_codings(name, value.lower())
            case b"content-type":
                self.content_type = value
            case b"accept-encoding":
                self.accepted = preferred(value)
            case b"accept":
                self.prefers_html = b"text/html" in value.lower() and _prefers_html(value)
            case b"authorization":
                self.credential = credential(value) or self.credential
            case b"x-api-key":
                self.credential = self.credential or credential(None, value)
            case b"traceparent":
                self.traceparent = value.decode("latin-1")
            case b"tracestate":
                self.tracestate = value.decode("latin-1")
            case other:
                self.sender.read(other, value.strip())

    def _check_single(self, name: bytes) -> None:
        if name in _SINGLE:
            if name in self.single:
                raise InvalidArgument(f"the header {name.decode().title()} is repeated", "send it once")
            self.single |= {name}

    def _read_codings(self, name: bytes, value: bytes) -> None:
        """Append the codings in ``value`` to the codings of earlier headers called ``name``."""
        if name == b"transfer-encoding":
            self.transfer += b"," * bool(self.transfer) + value.strip()
            return
        codings = map(bytes.strip, (self.encoding + b"," + value).split(b","))
        self.encoding = b",".join(coding for coding in codings if coding not in (b"", b"identity"))

    def read_key(self, name: bytes, value: bytes) -> None:
        """Read a header that gives access to a restricted part of the API. ``name`` is in lower case. Raises InvalidArgument."""
        key = name.decode("latin-1")
        if key in self.keys:
            raise InvalidArgument(f"the header {key.title()} is repeated", "send it once")
        self.keys[key] = value

    def check(self, web: WebAccess, method: bytes, version: str, url: bytes) -> None:
        """Check the framing and the sender of the complete head. Raises InvalidArgument, Unsupported, PermissionDenied."""
        if version not in _VERSIONS:
            raise UnknownVersion(f"HTTP/{version} is not supported over this connection", "send HTTP/1.1")
        if self.transfer and version == "1.0":
            raise InvalidArgument("HTTP/1.0 has no Transfer-Encoding", "send Content-Length (RFC 9112, section 6.1)")
        if self.transfer not in (b"", b"chunked"):
            raise Unsupported(
                f"Transfer-Encoding {quoted(self.transfer.decode('latin-1'))} is not supported", "use chunked"
            )
        if not url.startswith(b"/"):
            self._read_authority(url)
        if self.sender.host is None and version != "1.0":
            raise InvalidArgument(
                "the header Host is missing", "send it with the server's name (RFC 9112, section 3.2)"
            )
        self.cors = web.headers(self.sender.origin)
        web.check(method, self.sender)

    def _read_authority(self, url: bytes) -> None:
        """Read the host of a URL in absolute form, which overrides the header Host (RFC 9112, section 3.2.2)."""
        scheme, is_absolute, rest = url.partition(b"://")
        if not is_absolute:
            return  # ``*`` and the authority form of CONNECT identify no resource
        if scheme.lower() not in (b"http", b"https"):
            raise InvalidArgument(
                f"the scheme {quoted(scheme.decode('latin-1'))} is not supported", "use http or https"
            )
        authority = _AUTHORITY_END.split(rest, 1)[0]
        if self.sender.host is not None:
            self.sender.host = None
            self.sender.read(b"host", authority)


def _prefers_html(accept: bytes) -> bool:
    given = weights(accept)
    return given.get(b"text/html", 0.0) > given.get(b"application/json", given.get(b"*/*", 0.0))


class UnknownVersion(Unsupported):
    """A version of HTTP that the connection does not support."""

    http_status = 505


class KnownHeads(BoundedCache[bytes, RequestHead]):
    """Caches parsed heads. The key is the bytes of a head, including the empty line at its end."""

    def learn(self, text: bytes, head: RequestHead) -> None:
        """Cache ``head``, the result of parsing ``text``, unless ``text`` is long or parsers may disagree on where the head ends."""
        if len(text) <= MAX_KNOWN_BYTES and is_plain(text):
            self.remember(text, head)


def is_plain(text: bytes) -> bool:
    """True if all parsers agree on where the head ``text`` ends, because it has no leading empty line and all lines end with CRLF."""
    return text[:1] not in (b"\r", b"\n") and text.count(b"\n") == text.count(b"\r\n")
