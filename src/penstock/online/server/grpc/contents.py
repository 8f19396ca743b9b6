"""Decodes typed contents (``InferTensorContents``). Pure.

The protobuf class is not used, because its lists take many times the memory of arrays. Arrays of floats are views of the message.
Integers are decoded with numpy, one slice at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument
from penstock.online.server.request_layout import TensorLayout
from penstock.protocol import messages
from penstock.protocol.varint import read_varint
from penstock.tensor import Array, Buffer, DataType, element_count

_BOOLS, _INT32S, _INT64S, _UINT32S, _UINT64S, _FP32S, _FP64S, _BYTES = range(1, 9)
_FIELDS = {
    DataType.BOOL: _BOOLS,
    DataType.INT8: _INT32S,
    DataType.INT16: _INT32S,
    DataType.INT32: _INT32S,
    DataType.INT64: _INT64S,
    DataType.UINT8: _UINT32S,
    DataType.UINT16: _UINT32S,
    DataType.UINT32: _UINT32S,
    DataType.UINT64: _UINT64S,
    DataType.FP32: _FP32S,
    DataType.FP64: _FP64S,
    DataType.BYTES: _BYTES,
}
"""The number of the field for each datatype. There is no field for FP16 and BF16."""
_WIDE: dict[int, np.dtype[Any]] = {
    _BOOLS: np.dtype(np.uint64),
    _INT32S: np.dtype(np.int32),
    _INT64S: np.dtype(np.int64),
    _UINT32S: np.dtype(np.uint32),
    _UINT64S: np.dtype(np.uint64),
}
"""The type to which protobuf truncates the integers of each field."""
_NAMES = {field.number: field.name for field in messages.InferTensorContents.DESCRIPTOR.fields}

_SLICE = 1 << 16
_MAX_VARINT_BYTES = 10
_MAX_UNUSUAL_BYTES = 1 << 20
"""Maximum bytes of contents that are not a single packed list. The protobuf class parses such contents."""
_ELEMENT_BYTES = 48
"""Memory overhead of a BYTES element, in bytes."""


def decoded_bytes(tensor: TensorLayout, size: int) -> int:
    """Maximum memory, in bytes, for decoding ``size`` bytes of raw or typed contents. 0 if the tensor is a view of the message."""
    if tensor.datatype is DataType.BYTES:
        return min(element_count(tensor.shape), size) * _ELEMENT_BYTES + 2 * size
    return 0 if tensor.datatype.is_float else min(tensor.size_bytes, size * tensor.datatype.itemsize)


def decode_contents(model_name: str, tensor: TensorLayout, data: Buffer) -> Array:
    """Decode ``data``, a serialized InferTensorContents. Raises InvalidArgument."""
    count = element_count(tensor.shape)
    number = _FIELDS.get(tensor.datatype)
    if number is None:
        raise InvalidArgument(
            f"input '{tensor.name}': {tensor.datatype.value} has no typed contents", "send it in 'raw_input_contents'"
        )
    if number == _BYTES:
        elements = _read_bytes(data, count)
        if elements is None:
            elements = list(_parse(model_name, tensor, data, number).bytes_contents)
        _check_count(model_name, tensor, count, len(elements))
        array = np.empty(count, np.object_)
        for first in range(0, count, _SLICE):
            array[first : first + _SLICE] = elements[first : first + _SLICE]
        return array.reshape(tensor.shape)
    start = _packed(data, number)
    if start is None:
        data = _parse(model_name, tensor, data, number).SerializeToString()
        start = _packed(data, number)
        assert start is not None, "protobuf packs lists"
    packed = np.frombuffer(data, np.uint8, offset=start) if start < len(data) else np.empty(0, np.uint8)
    if tensor.datatype.is_float:
        found, left = divmod(len(packed), tensor.datatype.itemsize)
        if left:
            raise _no_contents(tensor)
        _check_count(model_name, tensor, count, found)
        return packed.view(tensor.datatype.dtype).reshape(tensor.shape)
    _check_count(model_name, tensor, count, int(np.count_nonzero(packed < 0x80)))
    return _integers(tensor, packed, count, _WIDE[number]).reshape(tensor.shape)


def _check_count(model_name: str, tensor: TensorLayout, count: int, found: int) -> None:
    """Raise InvalidArgument unless ``found`` equals ``count``. Called before memory is allocated for the declared shape."""
    if found != count:
        name = _NAMES[_FIELDS[tensor.datatype]]
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {list(tensor.shape)} for model '{model_name}' needs {count} elements, "
            f"but '{name}' has {found if found < count else 'more'}"
        )


def _packed(data: Buffer, number: int) -> int | None:
    """The offset of the elements if ``data`` is empty or a single packed list of field ``number``. None if it has another form."""
    if not data:
        return 0
    if data[0] != number << 3 | 2:
        return None
    try:
        length, start = read_varint(data, 1, len(data))
    except ValueError:
        return None
    return start if start + length == len(data) else None


def _parse(model_name: str, tensor: TensorLayout, data: Buffer, number: int) -> messages.Message:
    """Parse contents in an unusual form with the protobuf class. Raises InvalidArgument."""
    if len(data) > _MAX_UNUSUAL_BYTES:
        raise InvalidArgument(
            f"the contents of input '{tensor.name}' have {len(data)} bytes and are not a single packed list",
            "send the input in 'raw_input_contents'",
        )
    try:
        contents = messages.InferTensorContents.FromString(bytes(data))
    except DecodeError:
        raise _no_contents(tensor) from None
    for field, _ in contents.ListFields():
        if field.number != number:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model_name}': "
                f"'{field.name}', expected '{_NAMES[number]}' for datatype '{tensor.datatype.value}'"
            )
    contents.DiscardUnknownFields()
    return contents


def _no_contents(tensor: TensorLayout) -> InvalidArgument:
    return InvalidArgument(
        f"the message is not a ModelInferRequest: the contents of input '{tensor.name}' are malformed"
    )


def _read_bytes(data: Buffer, count: int) -> list[bytes] | None:
    """The elements of ``bytes_contents``, at most ``count + 1`` of them. None if ``data`` contains other fields."""
    elements: list[bytes] = []
    data, position, end, add = bytes(data), 0, len(data), elements.append
    try:
        while position < end:
            length = data[position + 1]
            start = position + 2
            if data[position] != _BYTES << 3 | 2:
                return None
            if length & 0x80:
                length, start = read_varint(data, position + 1, end)
            position = start + length
            add(data[start:position])
            if len(elements) > count:
                return elements
    except (IndexError, ValueError):
        return None
    return elements if position == end else None


def _integers(tensor: TensorLayout, packed: Array, count: int, wide: np.dtype[Any]) -> Array:
    """Decode the ``count`` varints in ``packed``. Raises InvalidArgument if a varint does not fit the datatype."""
    array = np.empty(count, tensor.datatype.dtype)
    start = filled = 0
    while start < len(packed):
        piece = packed[start : start + _SLICE]
        is_last = piece < 0x80
        if is_last.all():
            stop, values = len(piece), piece.astype(wide)
        else:
            ends = np.flatnonzero(is_last)
            if not len(ends) or (lengths := np.diff(ends, prepend=-1)).max() > _MAX_VARINT_BYTES:
                raise _no_contents(tensor)
            stop, values = int(ends[-1]) + 1, _joined(piece, ends - lengths + 1, lengths).astype(wide)
        cast = (values != 0) if tensor.datatype is DataType.BOOL else values.astype(array.dtype)
        if array.dtype.itemsize < wide.itemsize and tensor.datatype is not DataType.BOOL and (cast != values).any():
            wrong = values[cast != values][0]
            raise InvalidArgument(f"the data of input '{tensor.name}' do not fit {tensor.datatype.value}: {wrong}")
        array[filled : filled + len(cast)] = cast
        start, filled = start + stop, filled + len(cast)
    return array


def _joined(piece: Array, starts: Array, lengths: Array) -> Array:
    """The 64-bit varints that begin at ``starts`` in ``piece``, seven bits per byte."""
    values = (piece[starts] & 0x7F).astype(np.uint64)
    for number in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > number)
        values[longer] |= (piece[starts[longer] + number] & 0x7F).astype(np.uint64) << np.uint64(7 * number)
    return values
