"""The head of an HTTP request, parsed: every header that the server acts on.

Clients send the same head again and again. Its bytes are remembered with the result of parsing them, so that each head is
parsed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from penstock.errors import InvalidArgument
from penstock.online.server.access.auth import credential
from penstock.online.server.http.compression import preferred
from penstock.online.server.http.routes import NOWHERE, Handler, Route

_MAX_CACHED = 1024
_MAX_DIGITS = 18

MAX_KNOWN_BYTES = 2048
"""Longer heads are not remembered."""


class RequestHead(msgspec.Struct, gc=False):
    """The facts of one head. Once complete, it is shared by all requests that begin with the same bytes."""

    method: bytes = b""
    route: Route = NOWHERE
    handler: Handler | None = None
    """Of the route, for the method."""
    keep_alive: bool = True
    http_1_0: bool = False
    body_bytes: int = 0
    json_length: int | None = None
    """``Inference-Header-Content-Length``."""
    encoding: bytes = b""
    """``Content-Encoding`` in lower case; empty for identity."""
    content_type: bytes = b""
    accepted: bytes = b""
    """What ``Accept-Encoding`` likes best; empty for identity."""
    credential: bytes | None = None
    """The key in ``Authorization`` or ``X-API-Key``."""
    keys: dict[str, bytes] = {}
    """Headers that open restricted parts of the API, by name in lower case."""
    traceparent: str = ""
    tracestate: str = ""

    def read(self, name: bytes, value: bytes) -> None:
        """Read one header; headers that the server does not act on are ignored. Raises InvalidArgument."""
        if len(name) in _LENGTHS and (reader := _READERS.get(name.lower())):
            reader(self, value)


class KnownHeads(dict[bytes, RequestHead]):
    """The heads seen last, by their bytes up to and including the empty line. Their number and size are bounded."""

    def learn(self, text: bytes, head: RequestHead) -> None:
        """Remember ``head`` as the result of parsing ``text``."""
        if len(text) > MAX_KNOWN_BYTES or not is_plain(text):
            return
        if len(self) >= _MAX_CACHED:
            self.clear()
        self[text] = head


def is_plain(text: bytes) -> bool:
    """Whether every parser agrees where the head ``text`` ends: no empty line before it, and only CR LF as line end."""
    return text[:1] not in (b"\r", b"\n") and text.count(b"\n") == text.count(b"\r\n")


def _read_json_length(head: RequestHead, value: bytes) -> None:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise InvalidArgument("header Inference-Header-Content-Length is not a number of bytes")
    head.json_length = int(value)


def _read_encoding(head: RequestHead, value: bytes) -> None:
    encoding = value.strip().lower()
    head.encoding = b"" if encoding == b"identity" else encoding


def _read_content_type(head: RequestHead, value: bytes) -> None:
    head.content_type = value


def _read_accepted(head: RequestHead, value: bytes) -> None:
    head.accepted = preferred(value)


def _read_authorization(head: RequestHead, value: bytes) -> None:
    head.credential = credential(value) or head.credential


def _read_api_key(head: RequestHead, value: bytes) -> None:
    head.credential = head.credential or credential(None, value)


def _read_traceparent(head: RequestHead, value: bytes) -> None:
    head.traceparent = value.decode("latin-1")


def _read_tracestate(head: RequestHead, value: bytes) -> None:
    head.tracestate = value.decode("latin-1")


_READERS: Mapping[bytes, Callable[[RequestHead, bytes], None]] = {
    b"inference-header-content-length": _read_json_length,
    b"content-encoding": _read_encoding,
    b"content-type": _read_content_type,
    b"accept-encoding": _read_accepted,
    b"authorization": _read_authorization,
    b"x-api-key": _read_api_key,
    b"traceparent": _read_traceparent,
    b"tracestate": _read_tracestate,
}
_LENGTHS = frozenset(map(len, _READERS))
