"""Protobuf's numbers of variable length, for readers that walk a message without parsing it."""

from __future__ import annotations


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at ``position``, and where it ends. Raises ValueError if it does not before ``end``, or within ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        if position == end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number without end at byte {position}")
