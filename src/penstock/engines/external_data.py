"""Does an ONNX model keep tensors in other files? Told from its bytes alone.

Reads the protobuf wire format (tags and lengths, https://protobuf.dev/programming-guides/encoding) and goes down only where
tensors can be: one pass, constant memory. So a server need not import ``onnx``, nor parse the weights a second time.
"""

from __future__ import annotations

# By message of onnx.proto: the fields that lead to tensors, and the message that each holds.
_LEADS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
_DATA_LOCATION, _EXTERNAL = 14, 1

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100
"""Protobuf's own limit."""


def has_external_data(model: bytes) -> bool:
    """Whether any tensor of ``model``, a serialized ModelProto, says that its data are external.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    parents: list[tuple[str, int]] = []  # those around the current message: its type and its end
    message, position, end = "Model", 0, len(model)
    while True:
        while position == end:
            if not parents:
                return False
            message, end = parents.pop()
        tag, position = _varint(model, position, end)
        field, wire_type = tag >> 3, tag & 7
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        if wire_type == _VARINT:
            value, position = _varint(model, position, end)
            # Parsers keep the lower 32 bits of an enum.
            if message == "Tensor" and field == _DATA_LOCATION and value & 0xFFFFFFFF == _EXTERNAL:
                return True
        elif wire_type == _LENGTH:
            size, position = _varint(model, position, end)
        elif not size:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if field == 0 or position + size > end:
            raise ValueError(f"field {field} of {size} bytes at byte {position} of {end}")
        inner = _LEADS[message].get(field) if wire_type == _LENGTH else None
        if inner is None:
            position += size
        else:
            parents.append((message, end))
            message, end = inner, position + size
            if len(parents) > _MAX_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_DEPTH}")


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number of variable length at ``position``, and where it ends."""
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
