"""Timeouts, metadata and status messages in gRPC's headers and trailers (gRPC's document ``PROTOCOL-HTTP2``). Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from penstock.errors import InvalidArgument

_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MESSAGE_BYTES = 1000
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}
_OF_TRANSPORT = frozenset((b"te", b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding"))


def parse_timeout(value: bytes) -> float:
    """``grpc-timeout`` in seconds. Raises InvalidArgument."""
    digits, unit = value[:-1], _UNITS.get(value[-1:])
    if unit is None or not digits.isdigit() or len(digits) > 8:
        raise InvalidArgument(
            f"header grpc-timeout must be up to 8 digits and one of H, M, S, m, u, n, got '{value[:20].decode(errors='replace')}'"
        )
    return int(digits) * unit


def encode_message(message: str) -> bytes:
    """``message`` as the value of ``grpc-message``: percent-encoded, and truncated to a length that clients accept."""
    pieces: list[bytes] = []
    left = _MESSAGE_BYTES
    for character in message:
        piece = b"".join(
            bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in character.encode(errors="replace")
        )
        left -= len(piece)
        if left < 0:
            break
        pieces.append(piece)
    return b"".join(pieces)


def parse_metadata(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str | bytes]:
    """The metadata in a call's headers. Values of the same name are joined by commas."""
    raw: dict[bytes, bytes] = {}
    for name, value in headers:
        if not name.startswith(b":") and name not in _OF_TRANSPORT:
            raw[name] = raw[name] + b"," + value if name in raw else value
    return {
        name.decode("latin-1"): _decode_binary(value) if name.endswith(b"-bin") else value.decode("latin-1")
        for name, value in raw.items()
    }


def _decode_binary(value: bytes) -> bytes:
    """The first of the base64 values in ``value``, padded or not; empty if it is malformed."""
    first = value.partition(b",")[0]
    try:
        return base64.b64decode(first + b"=" * (-len(first) % 4), validate=True)
    except binascii.Error:
        return b""
