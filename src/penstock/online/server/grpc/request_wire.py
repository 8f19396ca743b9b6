"""Finds the id and the raw tensors among the outermost fields of a serialized ModelInferRequest. Pure.

A message that is not in the plain form that clients send is left to the protobuf class, so that both always agree.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.protocol.varint import read_varint
from penstock.tensor import Buffer

_MAX_LENGTH_BYTES = 5
_MAX_FIELDS = 4096
"""Maximum outermost fields of a request. Each input is one, and the smallest takes fifty times its bytes in memory."""

# A tag is the field's number times eight, plus two for a field with a length, as all fields of ModelInferRequest are.
_WITH_LENGTH = 2
_ID, _RAW = 3 << 3 | _WITH_LENGTH, 7 << 3 | _WITH_LENGTH
_LAST_FIELD = 7
_NONE = (0, 0)


class Parts(NamedTuple):
    """A request taken apart."""

    rest: bytes
    """All fields except the id and the raw tensors."""
    identity: tuple[int, int]
    """Start and end of the id; equal if there is none."""
    raw: list[tuple[int, int]]
    """Start and end of each raw tensor."""


def split(data: Buffer) -> Parts | None:
    """Take a serialized ModelInferRequest apart; None if only the protobuf class can decide whether it is one.

    Raises InvalidArgument if it has more than 4096 fields.
    """
    position, size, begin, fields = 0, len(data), 0, 0
    rest: list[Buffer] = []
    spans: list[tuple[int, int]] = []
    identity = _NONE
    try:
        while position < size:
            fields += 1
            if fields > _MAX_FIELDS:
                raise InvalidArgument(f"the request has more than {_MAX_FIELDS} fields")
            tag = data[position]
            if tag & 0x87 != _WITH_LENGTH:
                position = _skip(data, position)
                continue
            length, start = data[position + 1], position + 2
            if length & 0x80:
                length, start = _varint(data, position + 1)
            end = start + length
            # The last of several ids counts, but all of them have to be UTF-8.
            if end > size or (tag == _ID and identity != _NONE):
                return None
            if tag == _RAW:
                spans.append((start, end))
            elif tag == _ID:
                identity = (start, end)
            else:
                position = end
                continue
            if begin != position:
                rest.append(data[begin:position])
            begin = position = end
    except (IndexError, ValueError):
        return None
    if position != size:
        return None
    if begin != position:
        rest.append(data[begin:position])
    return Parts(bytes(rest[0]) if len(rest) == 1 else b"".join(rest), identity, spans)


def between(data: Buffer, holes: list[tuple[int, int]]) -> list[tuple[int, int, bytes]]:
    """Start, end and bytes of the parts of ``data`` between ``holes``, which are sorted and do not overlap."""
    at, found = 0, []
    for start, end in [*holes, (len(data), 0)]:
        if at < start:
            found.append((at, start, bytes(data[at:start])))
        at = end
    return found


def _skip(data: Buffer, position: int) -> int:
    """The end of the field at ``position``, which is not one of a request; the protobuf class will parse it.

    Raises ValueError if the field is not plain either.
    """
    tag, start = _varint(data, position)
    if tag >> 3 <= _LAST_FIELD:
        raise ValueError
    match tag & 7:
        case 0:
            return _varint(data, start)[1]
        case 1:
            return start + 8
        case 2:
            length, start = _varint(data, start)
            return start + length
        case 5:
            return start + 4
    raise ValueError


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    return read_varint(data, position, min(len(data), position + _MAX_LENGTH_BYTES))
