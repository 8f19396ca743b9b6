"""A SavedModel's main file, written without TensorFlow."""

from __future__ import annotations

from penstock.protocol.varint import write_varint


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return write_varint(number << 3) + write_varint(value % (1 << 64))
    data = value.encode() if isinstance(value, str) else value
    return write_varint(number << 3 | 2) + write_varint(len(data)) + data


def tensor(kind: int, *dims: int) -> bytes:
    return field(2, kind) + field(3, b"".join(field(2, field(1, size)) for size in dims))


def entry(name: str, value: bytes) -> bytes:
    return field(1, name) + field(2, value)


def saved_model() -> bytes:
    """A graph of a MatMul and a function with a Relu; inputs b FP32 (-1, 3) and a INT64 (2), output y of unknown rank."""
    signature = field(1, entry("b", tensor(1, -1, 3))) + field(1, entry("a", tensor(9, 2)))
    signature += field(2, entry("y", field(2, 19) + field(3, field(3, 1))))
    nodes = field(1, field(1, "m") + field(2, "MatMul")) + field(1, field(1, "p") + field(2, "Placeholder"))
    library = field(2, field(1, field(3, field(1, "r") + field(2, "Relu"))))
    meta = field(2, nodes + library) + field(5, entry("serving_default", signature)) + field(5, entry("train", b""))
    return field(1, 1) + field(2, meta)
