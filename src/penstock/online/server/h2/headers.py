"""Header blocks of gRPC calls over HTTP/2. Decodes HPACK (RFC 7541), validates headers, and chooses the method.

Clients repeat a small number of header blocks. The reader therefore caches decoded requests by the bytes of their blocks. The
meaning of a block depends on the dynamic table, so the cache is cleared when this table changes. Responses do not use the dynamic
table, so their blocks are constants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import hpack
import msgspec
from hpack.hpack import encode_integer
from hpack.table import HeaderTable

from penstock.errors import PenstockError, Unsupported, bounded, quoted
from penstock.online.server import status
from penstock.online.server.access.web import Sender, WebAccess
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.grpc_headers import encode_message, parse_metadata, parse_timeout
from penstock.online.server.h2.grpc_messages import ACCEPT_ENCODING, WINDOW_BITS
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

_KEPT_BLOCKS = 64
_KEPT_BLOCK_BYTES = 1024
_KEPT_BYTES = 32 << 10
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_PSEUDO = _REQUIRED | {b":authority"}
_OF_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb"[\x21-\x39\x3b-\x40\x5b-\x7e]+")
_VALUE = re.compile(rb"(?:[^\0\r\n\t ](?:[^\0\r\n]*[^\0\r\n\t ])?)?")

TABLE_SIZE_ZERO = b"\x20"
"""Sets the dynamic table's size to 0. When the client has reduced the table, the next block must start with this instruction."""


def literal(name: bytes, value: bytes) -> bytes:
    """A header field in HPACK form. Uses neither the dynamic table nor Huffman coding."""
    return b"\0" + b"".join((encode_integer(len(name), 7), name, encode_integer(len(value), 7), value))


RESPONSE = b"\x88" + literal(b"content-type", b"application/grpc")
"""The headers of every gRPC response: status 200 and the content type."""
OK_TRAILERS = literal(b"grpc-status", b"0")
_TEXT = literal(b"content-type", b"text/plain; charset=utf-8")
_WRONG_TYPE = literal(b":status", b"415") + literal(b"accept", b"application/grpc") + _TEXT
_WRONG_TYPE_TEXT = (
    b"This port answers gRPC over HTTP/2 (POST with content-type application/grpc), and REST over HTTP/1.1. "
    b"For REST, repeat the request with HTTP/1.1, for example with 'curl --http1.1'.\n"
)
_WRONG_METHOD = literal(b":status", b"405") + literal(b"allow", b"POST") + _TEXT
_WRONG_METHOD_TEXT = b"gRPC calls use the method POST.\n"


def trailers(error: PenstockError | None) -> bytes:
    """The header block that ends a call. ``RESPONSE`` and this block form a complete response without messages."""
    if error is None:
        return OK_TRAILERS
    block = literal(b"grpc-status", b"%d" % status.GRPC[error.code])
    block += literal(b"grpc-message", encode_message(bounded(str(error))))
    if error.retry_after_s is not None:
        block += literal(b"grpc-retry-pushback-ms", b"%d" % (error.retry_after_s * 1000))
    return block


class CallHead(msgspec.Struct, frozen=True):
    """The interpreted headers of a request. Requests with the same headers share one object."""

    metadata: Mapping[str, str | bytes] = {}
    method: GrpcMethod | None = None
    refusal: bytes = b""
    """The header block of the response if ``method`` is None."""
    text: bytes = b""
    """The body that follows ``refusal``."""
    malformed: bool = False
    """True if the request violates HTTP/2. Its stream is then reset."""
    timeout_s: float | None = None
    encoding: bytes = b""
    content_length: int | None = None
    units: int = 0
    """See ``GrpcMethod``."""
    size: int = 0
    """Bytes of the decoded headers if each request holds its own copy; 0 if requests share them."""


class _CountingTable(HeaderTable):
    """A dynamic table that counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


class HeaderReader:
    """Decodes the header blocks of one connection."""

    __slots__ = ("_decoder", "_known_bytes", "_methods", "_table", "_table_size", "_web", "known")

    def __init__(self, methods: Mapping[bytes, GrpcMethod], max_header_bytes: int, web: WebAccess) -> None:
        self._methods = methods
        self._web = web
        self._decoder = hpack.Decoder(max_header_bytes)
        self._decoder.header_table = self._table = _CountingTable()
        self._table_size = self._table.maxsize
        self.known: dict[bytes, CallHead] = {}
        """Decoded requests by header block."""
        self._known_bytes = 0

    def read(self, block: bytes) -> CallHead:
        """Decode the request with the header block ``block``. Raises ConnectionFault."""
        head = self.known.get(block)
        if head is None:
            changes = self._table.changes
            headers = self._decode(block)
            head, size = self._understand(headers), sum(len(name) + len(value) for name, value in headers)
            if self._table.changes != changes or len(block) > _KEPT_BLOCK_BYTES or size > _KEPT_BYTES:
                return msgspec.structs.replace(head, size=size)
            if len(self.known) >= _KEPT_BLOCKS or self._known_bytes + size > _KEPT_BYTES:
                self._forget()
            self.known[block] = head
            self._known_bytes += size
        return head

    def _forget(self) -> None:
        self.known.clear()
        self._known_bytes = 0

    def read_trailers(self, block: bytes) -> bool:
        """Decode the trailers of a request, and return True if they are well-formed. Raises ConnectionFault."""
        return all(not name.startswith(b":") and _is_well_formed(name, value) for name, value in self._decode(block))

    def _decode(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        changes = self._table.changes
        try:
            headers = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the headers exceed the limit") from None
        except (hpack.HPACKError, IndexError, ValueError, OverflowError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "the headers cannot be decoded") from None
        if self._table.changes != changes or self._table.maxsize != self._table_size:
            self._table_size = self._table.maxsize
            self._table.changes += 1  # a new table size is also a change
            self._forget()
        return headers

    def _understand(self, headers: Sequence[tuple[bytes, bytes]]) -> CallHead:
        sorted_out = _sort_out(headers)
        if sorted_out is None:
            return CallHead(malformed=True)
        pseudo, fields, content_length = sorted_out
        kind, is_head = fields.get(b"content-type", b"").lower(), pseudo[b":method"] == b"HEAD"
        if not kind.startswith(b"application/grpc") or kind[16:17] not in (b"", b"+", b";"):
            return CallHead(refusal=_WRONG_TYPE, text=b"" if is_head else _WRONG_TYPE_TEXT)
        if pseudo[b":method"] != b"POST":
            return CallHead(refusal=_WRONG_METHOD, text=b"" if is_head else _WRONG_METHOD_TEXT)
        method, accepted = self._methods.get(pseudo[b":path"]), b""
        timeout, encoding = fields.get(b"grpc-timeout"), fields.get(b"grpc-encoding", b"identity")
        try:
            self._web.check(b"POST", _sender(pseudo, fields))
            if method is None:
                raise Unsupported(f"there is no method {quoted(pseudo[b':path'].decode(errors='replace'))}")
            if encoding != b"identity" and encoding not in WINDOW_BITS:
                accepted = literal(b"grpc-accept-encoding", ACCEPT_ENCODING)
                raise Unsupported(
                    f"compression {quoted(encoding.decode(errors='replace'))} is not supported",
                    "use gzip, deflate or identity",
                )
            timeout_s = None if timeout is None else parse_timeout(timeout)
        except PenstockError as error:
            return CallHead(refusal=RESPONSE + accepted + trailers(error))
        return CallHead(
            parse_metadata(headers),
            method,
            timeout_s=timeout_s,
            encoding=encoding,
            content_length=content_length,
            units=method.units,
        )


def _sender(pseudo: Mapping[bytes, bytes], fields: Mapping[bytes, bytes]) -> Sender:
    """The headers that identify the sender of a call."""
    host = pseudo.get(b":authority") or fields.get(b"host") or b""
    site, mode = fields.get(b"sec-fetch-site", b""), fields.get(b"sec-fetch-mode", b"")
    return Sender(host, fields.get(b"origin", b""), site, mode)


def _sort_out(
    headers: Sequence[tuple[bytes, bytes]],
) -> tuple[dict[bytes, bytes], dict[bytes, bytes], int | None] | None:
    """Pseudo-headers, other fields and content length; None if they violate RFC 9113, section 8.3."""
    pseudo: dict[bytes, bytes] = {}
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name.startswith(b":"):
            if fields or name in pseudo or name not in _PSEUDO or not value:
                return None
            pseudo[name] = value
        elif not _is_well_formed(name, value) or (name == b"content-length" and fields.get(name, value) != value):
            return None
        else:
            fields[name] = value
    length = fields.get(b"content-length", b"0")
    if not pseudo.keys() >= _REQUIRED or not length.isdigit() or len(length) > 18:
        return None
    return pseudo, fields, int(length) if b"content-length" in fields else None


def _is_well_formed(name: bytes, value: bytes) -> bool:
    """True if a field is valid according to RFC 9113, section 8.2."""
    if name in _OF_CONNECTION or (name == b"te" and value != b"trailers"):
        return False
    return _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None
