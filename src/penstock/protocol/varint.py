"""Protobuf's variable-length integers, for code that reads or writes messages without the protobuf classes."""

from __future__ import annotations

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
