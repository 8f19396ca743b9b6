"""Protobuf's variable-length integers and fields, for code that reads or writes messages without the protobuf classes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
TAGS = b"\x3d\x40"
TAGGED_FLOATS = re.compile(rb"(?:\x3d.{4})*+", re.DOTALL)
TAGGED_INTEGERS = re.compile(rb"(?:\x40[\x80-\xff]{0,9}+[\x00-\x7f])*+")
"""Floats of field 7 and integers of field 8 with a tag for each, as in the attributes of ONNX. Those of trees have millions."""
_SMALL = [bytes((number,)) for number in range(0x80)]


def write_varint(number: int) -> bytes:
    """Encode ``number`` (>= 0) as a protobuf varint."""
    if number < 0x80:
        return _SMALL[number]
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def write_number(field: int, number: int) -> bytes:
    """Encode the field ``field`` with ``number`` (>= 0)."""
    return write_varint(field << 3 | _VARINT) + write_varint(number)


def write_field(field: int, *parts: bytes | memoryview) -> bytes:
    """Encode the field ``field``, a length-delimited value that consists of ``parts``."""
    content = b"".join(parts)
    return write_varint(field << 3 | _LENGTH) + write_varint(len(content)) + content


def read_varint(data: bytes | bytearray | memoryview, position: int, end: int) -> tuple[int, int]:
    """The number at ``position``, and the position after it. Raises ValueError if the number extends beyond ``end`` or ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        if position == end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"unterminated varint at byte {position}")


def read_fields(message: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The number and the value of each field of a protobuf message: an integer, or a view of a length-delimited value.

    Fields of 4 or 8 fixed bytes are skipped. Raises ValueError if the message is not well-formed.
    """
    data = memoryview(message)
    position, end = 0, len(data)
    while position < end:
        tag, position = read_varint(data, position, end)
        size = {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
        if tag & 7 in (_VARINT, _LENGTH):
            size, position = read_varint(data, position, end)
        elif not size:
            raise ValueError(f"wire type {tag & 7} at byte {position}")
        if tag & 7 == _VARINT:
            yield tag >> 3, size
            continue
        if position + size > end:
            raise ValueError(f"a field of {size} bytes at byte {position} of {end}")
        if tag & 7 == _LENGTH:
            yield tag >> 3, data[position : position + size]
        position += size


def read_views(message: bytes | memoryview, wanted: int) -> Iterator[memoryview]:
    """The length-delimited values of the field ``wanted``. Raises ValueError if the message is not well-formed."""
    return (value for field, value in read_fields(message) if field == wanted and isinstance(value, memoryview))
