"""Facts about an ONNX model before it is loaded, read from its bytes: external tensors, control flow.

Reads the protobuf wire format (https://protobuf.dev/programming-guides/encoding) and descends only into fields that can contain
tensors: one pass, constant memory. So a server need not import ``onnx``, nor parse the weights a second time.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.varint import read_varint

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
_GRAPHS = (6, 11)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100
"""Protobuf's own limit."""


def has_external_data(model: bytes) -> bool:
    """Whether any tensor of ``model``, a serialized ModelProto, says that its data are external.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    # Parsers keep the lower 32 bits of an enum.
    return any(
        message == "Tensor" and field == _DATA_LOCATION and value is not None and value & 0xFFFFFFFF == _EXTERNAL
        for message, field, value in _fields(model)
    )


def has_control_flow(model: bytes) -> bool:
    """Whether any operator of ``model`` has graphs of its own, as If, Loop and Scan have, so that its work depends on its data.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    return any(message == "Attribute" and field in _GRAPHS for message, field, _ in _fields(model))


def _fields(model: bytes) -> Iterator[tuple[str, int, int | None]]:
    """Every field where tensors can be: its message, its number, and its value if that is a number."""
    parents: list[tuple[str, int]] = []  # those around the current message: its type and its end
    message, position, end = "Model", 0, len(model)
    while True:
        while position == end:
            if not parents:
                return
            message, end = parents.pop()
        tag, position = read_varint(model, position, end)
        field, wire_type = tag >> 3, tag & 7
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        value = None
        if wire_type == _VARINT:
            value, position = read_varint(model, position, end)
        elif wire_type == _LENGTH:
            size, position = read_varint(model, position, end)
        elif not size:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if field == 0 or position + size > end:
            raise ValueError(f"field {field} of {size} bytes at byte {position} of {end}")
        yield message, field, value
        inner = _LEADS[message].get(field) if wire_type == _LENGTH else None
        if inner is None:
            position += size
        else:
            parents.append((message, end))
            message, end = inner, position + size
            if len(parents) > _MAX_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_DEPTH}")
