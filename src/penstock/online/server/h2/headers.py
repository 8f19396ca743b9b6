"""Header blocks of gRPC requests and answers over HTTP/2: HPACK (RFC 7541), checked, and decided upon.

Clients send the same few blocks over and over, so what a block decodes to is kept by its bytes for as long as the dynamic
table, which the meaning of a block depends on, has not changed. Answers use no dynamic table: their blocks are constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import hpack
import msgspec
from hpack.table import HeaderTable

from penstock.errors import PenstockError, Unsupported
from penstock.online.server import status
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2 import grpc_headers, grpc_messages
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

_KEPT_BLOCKS = 64
_KEPT_BLOCK_BYTES = 1024
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_PSEUDO = _REQUIRED | {b":authority"}
_OF_CONNECTION = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_FORBIDDEN_IN_VALUE = (b"\0", b"\r", b"\n")

TABLE_SIZE_ZERO = b"\x20"
"""Begins the first block after the client asked for a smaller dynamic table; we use none at all."""


def literal(name: bytes, value: bytes) -> bytes:
    """A header field as HPACK without the dynamic table; ``name`` has less than 127 bytes."""
    size = len(value)
    if size < 127:
        return b"\x00%c%b%c%b" % (len(name), name, size, value)
    rest, length = size - 127, bytearray(b"\x7f")
    while rest >= 128:
        length.append(rest & 127 | 128)
        rest >>= 7
    length.append(rest)
    return b"\x00%c%b%b%b" % (len(name), name, bytes(length), value)


RESPONSE = b"\x88" + literal(b"content-type", b"application/grpc")
"""The headers of every answer that has messages: status 200, and the type."""
OK_TRAILERS = literal(b"grpc-status", b"0")
_WRONG_TYPE = literal(b":status", b"415") + literal(b"accept", b"application/grpc")
_WRONG_METHOD = literal(b":status", b"405") + literal(b"allow", b"POST")


def trailers(error: PenstockError | None) -> bytes:
    """The block that ends a call; behind ``RESPONSE`` it is the answer of one that has no messages."""
    if error is None:
        return OK_TRAILERS
    block = literal(b"grpc-status", b"%d" % status.GRPC[error.code])
    block += literal(b"grpc-message", grpc_headers.encode_message(str(error)))
    if error.retry_after_s is not None:
        block += literal(b"grpc-retry-pushback-ms", b"%d" % (error.retry_after_s * 1000))
    return block


class CallHead(msgspec.Struct, frozen=True):
    """What the headers of a request come to. H2Context by all requests that have the same."""

    metadata: grpc_headers.Metadata
    method: GrpcMethod | None = None
    refusal: bytes = b""
    """The block that answers it at once, if there is no method that it could be given to."""
    malformed: bool = False
    """Whether it breaks the rules of HTTP/2, so that it is not answered at all."""
    timeout_s: float | None = None
    encoding: bytes = b""
    content_length: int | None = None
    is_unary: bool = False
    """Whether it is for a method that takes one message."""


class _CountingTable(HeaderTable):
    """A dynamic table that counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


class HeaderReader:
    """The decoding end of one connection."""

    __slots__ = ("_decoder", "_kept", "_methods", "_table", "_table_size")

    def __init__(self, methods: Mapping[bytes, GrpcMethod], max_header_bytes: int) -> None:
        self._methods = methods
        self._decoder = hpack.Decoder(max_header_bytes)
        self._decoder.header_table = self._table = _CountingTable()
        self._table_size = self._table.maxsize
        self._kept: dict[bytes, CallHead] = {}

    def read(self, block: bytes) -> CallHead:
        """The head of a request. Raises ConnectionFault."""
        head = self._kept.get(block)
        if head is None:
            changes = self._table.changes
            headers = self._decode(block)
            head = self._judge(headers)
            if self._table.changes == changes and len(block) <= _KEPT_BLOCK_BYTES:
                if len(self._kept) >= _KEPT_BLOCKS:
                    self._kept.clear()
                self._kept[block] = head
        return head

    def read_trailers(self, block: bytes) -> bool:
        """Decode what ends a request; whether it may. Raises ConnectionFault."""
        return all(not name.startswith(b":") and _is_well_formed(name, value) for name, value in self._decode(block))

    def _decode(self, block: bytes) -> Sequence[tuple[bytes, bytes]]:
        changes = self._table.changes
        try:
            headers: Sequence[tuple[bytes, bytes]] = [
                (name, value) for name, value in self._decoder.decode(block, raw=True)
            ]
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the headers are larger than they may be") from None
        except (hpack.HPACKError, IndexError, ValueError, OverflowError):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "the headers cannot be decoded") from None
        if self._table.changes != changes or self._table.maxsize != self._table_size:
            self._table_size = self._table.maxsize
            self._table.changes += 1  # a new size is a change as well
            self._kept.clear()
        return headers

    def _judge(self, headers: Sequence[tuple[bytes, bytes]]) -> CallHead:
        metadata = grpc_headers.Metadata(headers)
        sorted_out = _sort_out(headers)
        if sorted_out is None:
            return CallHead(metadata, malformed=True)
        pseudo, fields, content_length = sorted_out
        if pseudo[b":method"] != b"POST":
            return CallHead(metadata, refusal=_WRONG_METHOD, content_length=content_length)
        kind = fields.get(b"content-type", b"").lower()
        if not kind.startswith(b"application/grpc") or kind[16:17] not in (b"", b"+", b";"):
            return CallHead(metadata, refusal=_WRONG_TYPE, content_length=content_length)
        try:
            return self._accept(pseudo[b":path"], fields, metadata, content_length)
        except PenstockError as error:
            return CallHead(metadata, refusal=RESPONSE + trailers(error), content_length=content_length)

    def _accept(
        self, path: bytes, fields: Mapping[bytes, bytes], metadata: grpc_headers.Metadata, content_length: int | None
    ) -> CallHead:
        """The head of what is a gRPC request. Raises InvalidArgument and Unsupported."""
        method = self._methods.get(path)
        if method is None:
            raise Unsupported(f"there is no method '{path.decode(errors='replace')}'")
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding != b"identity" and encoding not in grpc_messages.WINDOW_BITS:
            error = Unsupported(f"messages compressed with '{encoding.decode(errors='replace')}' are not taken")
            accepted = literal(b"grpc-accept-encoding", grpc_messages.ACCEPT_ENCODING)
            return CallHead(metadata, refusal=RESPONSE + accepted + trailers(error), content_length=content_length)
        timeout = fields.get(b"grpc-timeout")
        timeout_s = None if timeout is None else grpc_headers.parse_timeout(timeout)
        return CallHead(
            metadata,
            method,
            timeout_s=timeout_s,
            encoding=encoding,
            content_length=content_length,
            is_unary=method.unary is not None,
        )


def _sort_out(
    headers: Sequence[tuple[bytes, bytes]],
) -> tuple[dict[bytes, bytes], dict[bytes, bytes], int | None] | None:
    """Pseudo-headers, the other fields and the content's length, of headers that follow the rules (RFC 9113, section 8.3)."""
    pseudo: dict[bytes, bytes] = {}
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name.startswith(b":"):
            if fields or name in pseudo or name not in _PSEUDO or not value:
                return None
            pseudo[name] = value
        elif not _is_well_formed(name, value):
            return None
        else:
            fields[name] = value
    length = fields.get(b"content-length", b"0")
    if not pseudo.keys() >= _REQUIRED or not length.isdigit() or len(length) > 18:
        return None
    return pseudo, fields, int(length) if b"content-length" in fields else None


def _is_well_formed(name: bytes, value: bytes) -> bool:
    """RFC 9113, section 8.2."""
    if not name or name in _OF_CONNECTION or name != name.lower() or (name == b"te" and value != b"trailers"):
        return False
    return not any(each in name or each in value for each in _FORBIDDEN_IN_VALUE) and not name.count(b" ")
