"""Walks the outermost fields of a serialized ModelInferRequest for the positions of its id and raw tensors. Pure.

A message that is not in the plain form that clients send is left to the protobuf class, so that the two cannot differ.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.tensor import Buffer

_MAX_LENGTH_BYTES = 5
_MAX_FIELDS = 4096
"""Most fields on the outside of a request. Each input is one, and the smallest makes fifty times its bytes in memory."""

# A field's tag is its number times eight, plus two for what has a length, as all of ModelInferRequest have.
_WITH_LENGTH = 2
_ID, _RAW = 3 << 3 | _WITH_LENGTH, 7 << 3 | _WITH_LENGTH
_LAST_FIELD = 7
_NONE = (0, 0)


class Parts(NamedTuple):
    """A request taken apart: all but the id and the raw tensors, and where those begin and end."""

    rest: bytes
    identity: tuple[int, int]
    """Equal if there is no id."""
    raw: list[tuple[int, int]]


def split(data: Buffer) -> Parts | None:
    """Take a serialized ModelInferRequest apart; None if only the protobuf class can decide whether it is one.

    Raises InvalidArgument if it has more fields than a request needs.
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
            # Of several ids the last one holds, but all have to be text.
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
    except IndexError:
        return None
    if position != size:
        return None
    if begin != position:
        rest.append(data[begin:position])
    return Parts(bytes(rest[0]) if len(rest) == 1 else b"".join(rest), identity, spans)


def between(data: Buffer, holes: list[tuple[int, int]]) -> list[tuple[int, int, bytes]]:
    """What of ``data`` is not in ``holes``, which stand in order and do not overlap."""
    at, found = 0, []
    for start, end in [*holes, (len(data), 0)]:
        if at < start:
            found.append((at, start, bytes(data[at:start])))
        at = end
    return found


def _skip(data: Buffer, position: int) -> int:
    """The end of the field at ``position``, of another kind than those of a request; it is left to the protobuf class.

    Raises IndexError if it is not a plain one either.
    """
    tag, start = _varint(data, position)
    if tag >> 3 <= _LAST_FIELD:
        raise IndexError
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
    raise IndexError


def _varint(data: Buffer, position: int) -> tuple[int, int]:
    """The number at ``position``, and where it ends. Raises IndexError if it is cut off or too long to be a length."""
    number = 0
    for index in range(_MAX_LENGTH_BYTES):
        byte = data[position + index]
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, position + index + 1
    raise IndexError
