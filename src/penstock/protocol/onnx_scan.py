"""Properties of an ONNX model that are needed before loading, such as its external files and its use of control flow.

The scanner reads the protobuf wire format (tags and lengths, https://protobuf.dev/programming-guides/encoding) in one pass and
constant memory. It parses only messages that can contain tensors. With this scanner, the server neither imports ``onnx`` nor
parses the weights twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.varint import TAGGED_FLOATS, TAGGED_INTEGERS, TAGS, read_varint, read_views

# For each message type of onnx.proto, the fields that can contain tensors, and the type of each of these fields.
_LEADS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
    "Entry": {},
}
_DATA_LOCATION, _EXTERNAL = 14, 1
_EXTERNAL_DATA = 13
_DATA_TYPE, _INTEGER, _FP16 = 2, 3, 10
"""The fields of a tensor's type and of an attribute's number, and the number of the type FP16."""
_KEY, _VALUE = 1, 2
"""Fields of an entry in a tensor's external data."""
_GRAPHS = (6, 11)
_OPERATOR = 4
"""The field of a node's operator."""
_RECURRENT = (b"LSTM", b"GRU", b"RNN")
"""Ends of the names of recurrent operators."""

_KEPT = {("Tensor", _EXTERNAL_DATA), ("Node", _OPERATOR)}
"""The fields whose values are read."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 100
"""The nesting limit of protobuf itself."""


def has_external_data(model: bytes) -> bool:
    """True if any tensor of ``model``, a serialized ModelProto, has external data.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    # Like protobuf parsers, keep the lower 32 bits of an enum.
    return any(
        message == "Tensor" and field == _DATA_LOCATION and isinstance(value, int) and value & 0xFFFFFFFF == _EXTERNAL
        for message, field, value in _fields(model)
    )


def external_files(model: bytes) -> set[str]:
    """The names of the external files of ``model``. Raises ValueError if the bytes are not well-formed protobuf."""
    if not has_external_data(model):
        return set()
    found = set()
    for message, field, entry in _fields(model):
        if message == "Tensor" and field == _EXTERNAL_DATA and isinstance(entry, bytes):
            texts = {number: text for _, number, text in _fields(entry, "Entry") if isinstance(text, bytes)}
            if texts.get(_KEY) == b"location":
                found.add(texts.get(_VALUE, b"").decode("utf-8", "surrogateescape"))
    return found


def has_control_flow(model: bytes) -> bool:
    """True if an operator of ``model`` contains graphs, as If, Loop and Scan do. Its run time may then depend on its inputs.

    Raises ValueError if the bytes are not well-formed protobuf.
    """
    return any(message == "Attribute" and field in _GRAPHS for message, field, _ in _fields(model))


def may_have_half_constants(model: bytes) -> bool:
    """True if ``model`` has constants in FP16, or can get some by constant folding. Raises ValueError if the bytes are not well-formed
    protobuf.

    An operator that casts to FP16 has an attribute with the number of this type, but so may others, which only costs time.
    """
    casts = {("Tensor", _DATA_TYPE), ("Attribute", _INTEGER)}
    return any((message, field) in casts and value == _FP16 for message, field, value in _fields(model))


def unranked_inputs(model: bytes) -> frozenset[str]:
    """The inputs of ``model`` that are tensors of unknown rank. Raises ValueError if the bytes are not well-formed protobuf."""
    found = set()
    for graph in read_views(model, 7):
        for value in read_views(graph, 11):
            tensors = [tensor for kind in read_views(value, 2) for tensor in read_views(kind, 1)]
            if tensors and not any(True for tensor in tensors for _ in read_views(tensor, 2)):
                found.add(b"".join(read_views(value, 1)).decode("utf-8", "surrogateescape"))
    return frozenset(found)


def has_recurrence(model: bytes) -> bool:
    """True if ``model`` has an operator LSTM, GRU or RNN, also in the body of another operator or of a function. Raises ValueError
    if the bytes are not well-formed protobuf.
    """
    if not any(name in model for name in _RECURRENT):
        return False
    return any(
        message == "Node" and field == _OPERATOR and isinstance(name, bytes) and name.endswith(_RECURRENT)
        for message, field, name in _fields(model)
    )


def _fields(model: bytes, message: str = "Model") -> Iterator[tuple[str, int, int | bytes | None]]:
    """Yield the fields of all messages that may contain tensors: the type of the message, the field number, and the value if the
    field is a number, the name of an operator or an entry of external data. The numbers of an attribute are left out.
    """
    parents: list[tuple[str, int]] = []  # the enclosing messages, each with its type and end
    position, end = 0, len(model)
    while True:
        while position == end:
            if not parents:
                return
            message, end = parents.pop()
        is_number = message == "Attribute" and model[position] in TAGS
        if is_number and (after := _after_numbers(model, position, end)) > position:
            position = after
            continue
        tag, position = read_varint(model, position, end)
        field, wire_type = tag >> 3, tag & 7
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, 0)
        value: int | bytes | None = None
        if wire_type == _VARINT:
            value, position = read_varint(model, position, end)
        elif wire_type == _LENGTH:
            size, position = read_varint(model, position, end)
        elif not size:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if field == 0 or position + size > end:
            raise ValueError(f"invalid field {field} of {size} bytes at byte {position} of {end}")
        if wire_type == _LENGTH and (message == "Entry" or (message, field) in _KEPT):
            value = model[position : position + size]
        yield message, field, value
        inner = _LEADS[message].get(field) if wire_type == _LENGTH else None
        if inner is None:
            position += size
        else:
            parents.append((message, end))
            message, end = inner, position + size
            if len(parents) > _MAX_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_DEPTH}")


def _after_numbers(model: bytes, position: int, end: int) -> int:
    """The position after the elements of ``floats`` and ``ints`` that begin at ``position``."""
    for numbers in (TAGGED_FLOATS, TAGGED_INTEGERS):
        found = numbers.match(model, position, end)
        position = found.end() if found else position
    return position
