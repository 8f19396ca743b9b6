"""Finds the id, the raw tensors and the typed contents in a serialized ModelInferRequest. Pure.

Only messages with the usual encoding are split. The protobuf class parses all other messages, so all results agree with protobuf.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from penstock.errors import InvalidArgument
from penstock.protocol.varint import read_varint, write_varint
from penstock.tensor import Buffer

MAX_FIELDS = 4096
"""Maximum fields of a request, including those of its inputs and outputs. In memory, a field
takes up to a hundred times as many bytes as in the message."""

_MAX_LENGTH_BYTES = 5

# A tag is the field number times eight, plus two for a length-delimited field. All fields of ModelInferRequest are length-delimited.
_WITH_LENGTH = 2
_ID, _INPUT, _OUTPUT, _RAW = (number << 3 | _WITH_LENGTH for number in (3, 5, 6, 7))
_CONTENTS = 5 << 3 | _WITH_LENGTH
_OUTER = range(8)
"""Field numbers of a request. No field has the number 0."""
_INNER = (0, 5)
_NONE = (0, 0)
_LONG_TAG = _CONTENTS | 0x80
"""The first byte of the same tag if it is encoded in more bytes than necessary."""
_NO_CONTENTS = bytes((_CONTENTS, 0))
_SMALL_BYTES = 128
_BYTES_PER_FIELD = 16

Span = tuple[int, int]


class Parts(NamedTuple):
    """The parts of a serialized request."""

    rest: bytes
    """A message with all fields except the id, the raw tensors, and the typed contents."""
    identity: Span
    """Start and end of the id. Both are equal if there is no id."""
    raw: list[Span]
    """Start and end of each raw tensor."""
    contents: list[Span]
    """Start and end of the typed contents of each input that has typed contents."""


def split(data: Buffer, most: int = MAX_FIELDS) -> Parts | None:  # noqa: C901, PLR0912, PLR0915 - each call saved here counts
    """Split a serialized ModelInferRequest. Returns None if its encoding is unusual. The protobuf class must then parse it.

    Raises InvalidArgument if the request has more than ``most`` fields.
    """
    position, size, begin, fields = 0, len(data), 0, 0
    rest: list[Buffer] = []
    raw: list[Span] = []
    contents: list[Span] = []
    identity = _NONE
    try:
        while position < size:
            fields += 1
            if fields > most:
                raise InvalidArgument(f"the request has more than {most} fields")
            tag = data[position]
            if tag & 0x87 != _WITH_LENGTH:
                position = _skip(data, position)
                continue
            length, start = data[position + 1], position + 2
            if length & 0x80:
                length, start = _varint(data, position + 1)
            end = start + length
            # If there are several ids, the last id counts, but all ids must be UTF-8.
            if end > size or (tag == _ID and identity != _NONE):
                return None
            if tag == _RAW:
                raw.append((start, end))
            elif tag == _ID:
                identity = (start, end)
            elif tag in (_INPUT, _OUTPUT):
                inside = data[start:end]
                if length <= _SMALL_BYTES and _CONTENTS not in inside and _LONG_TAG not in inside:
                    # The common case: a small input or output without typed contents, whose fields need not be visited.
                    fields += length // _BYTES_PER_FIELD
                    position = end
                    continue
                fields, found = _look_into(data, start, end, fields, most)
                if found is None or tag == _OUTPUT:
                    position = end
                    continue
                first, span = found
                contents.append(span)
                inside = b"".join((data[start:first], _NO_CONTENTS, data[span[1] : end]))
                rest += (data[begin:position], bytes((_INPUT,)) + write_varint(len(inside)), inside)
                begin = position = end
                continue
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
    return Parts(bytes(rest[0]) if len(rest) == 1 else b"".join(rest), identity, raw, contents)


def check_fields(data: Buffer) -> None:
    """Raise InvalidArgument if the message ``data`` has more than 4096 top-level fields, or is malformed."""
    position = 0
    try:
        for _ in range(MAX_FIELDS):
            if position >= len(data):
                return
            position = _skip(data, position, ())
    except (IndexError, ValueError):
        raise InvalidArgument("the message is malformed") from None
    raise InvalidArgument(f"the message has more than {MAX_FIELDS} fields")


def between(data: Buffer, holes: list[Span]) -> list[tuple[int, int, bytes]]:
    """Start, end and content of the parts of ``data`` between ``holes``, which are sorted and do not overlap."""
    at, found = 0, []
    for start, end in [*holes, (len(data), 0)]:
        if at < start:
            found.append((at, start, bytes(data[at:start])))
        at = end
    return found


def _look_into(data: Buffer, start: int, stop: int, fields: int, most: int) -> tuple[int, tuple[int, Span] | None]:
    """Count the fields of the input or output in ``data[start:stop]``. Also returns the start and the content of its typed contents.

    Raises ValueError if the form is not plain, and InvalidArgument for more than ``most`` fields.
    """
    found, position = None, start
    while position < stop:
        fields += 1
        if fields > most:
            raise InvalidArgument(f"the request has more than {most} fields")
        tag, first = data[position], position
        if tag & 0x87 != _WITH_LENGTH:
            position = _skip(data, position, _INNER)
        else:
            length, begin = _varint(data, position + 1)
            position = begin + length
            if tag == _CONTENTS:
                if found is not None:
                    raise ValueError
                found = first, (begin, position)
    if position != stop:
        raise ValueError
    return fields, found


def _skip(data: Buffer, position: int, known: Container[int] = _OUTER) -> int:
    """The end of the field at ``position``. The protobuf class will parse this field.

    Raises ValueError for one of the ``known`` fields, because it is then not in the plain form, and for protobuf's deprecated groups.
    """
    tag, start = _varint(data, position)
    if tag >> 3 in known:
        raise ValueError
    match tag & 7:
        case 0:
            return read_varint(data, start, len(data))[1]
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
