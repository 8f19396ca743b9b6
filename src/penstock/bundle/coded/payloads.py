"""Find the weights in the bytes of an ONNX file, so that they can be cut out and inserted again bit for bit.

Reads the protobuf wire format (https://protobuf.dev/programming-guides/encoding): ``ModelProto.graph.initializer.raw_data``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from penstock.protocol.varint import read_varint

_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA = 1, 2, 8, 9
_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}

# By onnx.TensorProto.DataType: name, and bytes per element.
_TYPES = {
    1: ("float32", 4),
    2: ("uint8", 1),
    3: ("int8", 1),
    4: ("uint16", 2),
    5: ("int16", 2),
    6: ("int32", 4),
    7: ("int64", 8),
    9: ("bool", 1),
    10: ("float16", 2),
    11: ("float64", 8),
    12: ("uint32", 4),
    13: ("uint64", 8),
    16: ("bfloat16", 2),
}
ITEM_SIZES = dict(_TYPES.values())


class Payload(NamedTuple):
    """The raw data of one initialiser: bytes ``start`` to ``stop`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def find_payloads(model: bytes) -> list[Payload]:
    """The initialisers of the main graph with raw data of a plain type, in the order of the file.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    found = []
    for field, start, stop in _fields(model, 0, len(model)):
        if field != _GRAPH or stop < 0:
            continue
        for inner, first, last in _fields(model, start, stop):
            payload = _read_tensor(model, first, last) if inner == _INITIALIZER and last >= 0 else None
            if payload:
                found.append(payload)
    return found


def _read_tensor(model: bytes, start: int, stop: int) -> Payload | None:
    name, dtype, shape, raw = "", 0, [], (0, 0)
    for field, value, end in _fields(model, start, stop):
        if field == _DIMS and end >= 0:  # packed
            at = value
            while at < end:
                size, at = read_varint(model, at, end)
                shape.append(size)
        elif field == _DIMS:
            shape.append(value)
        elif field == _DATA_TYPE:
            dtype = value
        elif field == _NAME and end >= 0:
            name = model[value:end].decode("utf-8", "replace")
        elif field == _RAW_DATA and end >= 0:
            raw = (value, end)
    kind, size = _TYPES.get(dtype, ("", 0))
    return Payload(name, kind, tuple(shape), *raw) if kind and prod(shape) * size == raw[1] - raw[0] else None


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """For each field, its number and the start and end of its content; for a field without a length, its value and -1."""
    while position < end:
        tag, position = read_varint(data, position, end)
        kind = tag & 7
        if kind == _VARINT:
            value, position = read_varint(data, position, end)
            yield tag >> 3, value, -1
            continue
        size = _FIXED.get(kind)
        if kind == _LENGTH:
            size, position = read_varint(data, position, end)
        if size is None or position + size > end:
            raise ValueError(f"field {tag >> 3} (wire type {kind}) at byte {position} is invalid or too long")
        if kind == _LENGTH:
            yield tag >> 3, position, position + size
        position += size
