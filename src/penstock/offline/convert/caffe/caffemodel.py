"""Read the weights in a ``.caffemodel`` file: a binary protobuf message ``NetParameter``, in its current form and in the form V1."""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import InvalidModel, Unsupported
from penstock.protocol.varint import read_fields, read_varint
from penstock.tensor import Array

_LAYERS = {100: (1, 7), 2: (4, 6)}
"""The fields of ``NetParameter`` that hold layers, each with the fields of the layer's name and of its blobs."""
_V1 = 2
_DATA, _SHAPE, _DOUBLES = 5, 7, 8
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HINT = "fetch or train the weights again"


def read_caffemodel(data: bytes) -> dict[str, list[Array]]:
    """The blobs of each layer, by the layer's name, as read-only views of ``data``. Raises InvalidModel, Unsupported."""
    if data.startswith(_HDF5):
        raise Unsupported("the weights are an HDF5 file", "save them as .caffemodel: 'snapshot_format: BINARYPROTO'")
    found: dict[str, list[Array]] = {}
    try:
        for field, value in read_fields(data):
            if field in _LAYERS and isinstance(value, memoryview):
                name, blobs = _layer(value, field)
                found[name] = blobs
    except (OverflowError, ValueError) as error:
        raise InvalidModel(
            f"the weights are not a .caffemodel file, or it is truncated or corrupt: {error}", _HINT
        ) from None
    if not found:
        raise InvalidModel("the weights are not a .caffemodel file: it contains no layer", _HINT)
    return found


def _layer(message: memoryview, kind: int) -> tuple[str, list[Array]]:
    name_field, blob_field = _LAYERS[kind]
    name, blobs = "", []
    for field, value in read_fields(message):
        if isinstance(value, memoryview):
            if kind == _V1 and field == 1:
                raise Unsupported(
                    "the weights have the format V0 of 2013", "convert them with 'upgrade_net_proto_binary'"
                )
            if field == name_field:
                name = bytes(value).decode()
            elif field == blob_field:
                blobs.append(_blob(value))
    return name, blobs


def _blob(message: memoryview) -> Array:
    legacy = {1: 1, 2: 1, 3: 1, 4: 1}
    shape: list[int] | None = None
    parts: list[Array] = []
    for field, value in read_fields(message):
        if isinstance(value, int):
            if field in legacy:
                legacy[field] = value
        elif field == _SHAPE:
            shape = _dims(value)
        elif field in (_DATA, _DOUBLES):
            parts.append(np.frombuffer(value, "<f4" if field == _DATA else "<f8").astype(np.float32, copy=False))
    dims = list(legacy.values()) if shape is None else shape
    values = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])
    if math.prod(dims) != values.size:
        raise ValueError(f"a blob of shape {dims} has {values.size} values")
    return values.reshape(dims)


def _dims(message: memoryview) -> list[int]:
    dims: list[int] = []
    for field, value in read_fields(message):
        if field != 1:
            continue
        if isinstance(value, int):
            dims.append(value)
            continue
        position = 0
        while position < len(value):
            dim, position = read_varint(value, position, len(value))
            dims.append(dim)
    return dims
