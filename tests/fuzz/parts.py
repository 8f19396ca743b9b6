"""Splits valid messages into the parts that the mutator tampers with."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence

from penstock.protocol.varint import read_varint, write_varint
from tests.fuzz.mutator import Seed

_WORDS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\[\]{},:"]+|"')
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_TEXT = re.compile(rb"\w+|\s+|[^\w\s]")
LENGTH = struct.Struct("<I")


def words(text: bytes) -> Seed:
    """JSON, by tokens."""
    return tuple(_WORDS.findall(text))


def json_words(content: object) -> Seed:
    """``content`` as JSON, by tokens."""
    return words(json.dumps(content).encode())


def tokens(text: bytes) -> Seed:
    """Any other text: words, spaces and signs."""
    return tuple(_TEXT.findall(text))


def lines(text: bytes) -> Seed:
    """Text, by lines."""
    return tuple(_LINE.findall(text))


def pieces(data: bytes, size: int = 6) -> Seed:
    """Binary data without structure."""
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def fields(data: bytes) -> Seed:
    """A serialized protobuf message of fields that have a length: tag, length and content are each a part."""
    parts, position = [], 0
    while position < len(data):
        length, start = read_varint(data, position + 1, len(data))
        parts += [data[position : position + 1], data[position + 1 : start], data[start : start + length]]
        position = start + length
    return tuple(parts)


def relength(parts: Sequence[bytes]) -> Sequence[bytes]:
    """Parts of ``fields``, with the right lengths if they still come in threes."""
    if len(parts) % 3:
        return parts
    return [write_varint(len(parts[at + 1])) if at % 3 == 1 else part for at, part in enumerate(parts)]


def sized(data: bytes) -> Seed:
    """The length of ``data``, and its pieces."""
    return (LENGTH.pack(len(data)), *pieces(data))


def resized(data: bytes) -> bytes:
    """A message of ``sized``, with the right length."""
    return LENGTH.pack(max(0, len(data) - LENGTH.size)) + data[LENGTH.size :]
