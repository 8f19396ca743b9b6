"""A cached response, which is immutable, independent of the request's buffers, and serialisable.

The serialised form, version 1, little-endian::

    "PSA1"   4 bytes
    size     4 bytes: length of the head
    head     MessagePack: [[[output's name, datatype, shape, bytes of data], ...], parameters]
    data     of each output in order, in the protocol's binary form
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping

import msgspec
import numpy as np

from penstock.errors import IntegrityError, PenstockError, Unsupported
from penstock.request import InferRequest, InferResponse, Parameters
from penstock.tensor import Array, Buffer, DataType, from_wire, to_wire

_MAGIC = b"PSA1"
_SIZE = struct.Struct("<I")
_START = len(_MAGIC) + _SIZE.size
_SCALARS = (str, int, float, bool)
_ENTRY_BYTES = 600
_OUTPUT_BYTES = 400
_ELEMENT_BYTES = 48
_PARAMETER_BYTES = 100
"""Estimated bytes of the Python objects of a response, an output, an element of a BYTES tensor, and a parameter."""


class _Output(msgspec.Struct, array_like=True, frozen=True):
    name: str
    datatype: DataType
    shape: tuple[int, ...]
    size_bytes: int


class _Head(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    outputs: tuple[_Output, ...]
    parameters: dict[str, str | int | float | bool]


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


class CachedAnswer(msgspec.Struct, frozen=True):
    """The outputs and parameters of a response, and their size in memory. The arrays are always read-only."""

    outputs: Mapping[str, Array]
    parameters: Parameters
    size_bytes: int

    def to(self, request: InferRequest) -> InferResponse:
        """The response to ``request``. All responses from this object share the same read-only arrays."""
        return InferResponse(
            request.model_name,
            request.model_version,
            # A view of a read-only array, unlike the array itself, cannot be made writable again.
            {name: array.view() for name, array in self.outputs.items()},
            request.id,
            dict(self.parameters),
        )

    def to_bytes(self) -> bytes:
        """The serialised form. Raises IntegrityError if the parameters cannot be serialised."""
        outputs, parts = [], []
        for name, array in self.outputs.items():
            data = to_wire(array)
            outputs.append(_Output(name, DataType.from_numpy(array.dtype), array.shape, len(data)))
            parts.append(data)
        try:
            head = _encode_head(_Head(tuple(outputs), self.parameters))
        except (TypeError, ValueError, OverflowError) as error:
            raise IntegrityError(f"a response cannot be stored: {error}") from None
        return b"".join([_MAGIC, _SIZE.pack(len(head)), head, *parts])


def freeze(response: InferResponse) -> CachedAnswer:
    """A copy of ``response`` for the cache. Raises PenstockError if an output or a parameter has an unsupported type."""
    if any(type(value) not in _SCALARS for value in response.parameters.values()):
        raise Unsupported("a parameter of the response is neither a string nor a number")
    outputs = {}
    for name, array in response.outputs.items():
        outputs[name] = _immutable(bytes(to_wire(array)), DataType.from_numpy(array.dtype), array.shape)
    return _measure(outputs, dict(response.parameters))


def from_bytes(stored: Buffer) -> CachedAnswer:
    """Read the serialised form. Memory is allocated only for data that is present, because the declared sizes may be corrupt.

    Raises IntegrityError.
    """
    try:
        return _decode(memoryview(stored))
    except (msgspec.MsgspecError, PenstockError, ValueError, RecursionError) as error:
        raise IntegrityError(f"a stored response is corrupt: {error}") from None


def _decode(stored: memoryview) -> CachedAnswer:
    if stored[: len(_MAGIC)] != _MAGIC or len(stored) < _START:
        raise ValueError("it has a different format")
    end = _START + _SIZE.unpack_from(stored, len(_MAGIC))[0]
    if end > len(stored):
        raise ValueError("it is truncated")
    head = _decode_head(stored[_START:end])
    outputs: dict[str, Array] = {}
    for output in head.outputs:
        start, end = end, end + output.size_bytes
        if output.size_bytes < 0 or end > len(stored) or output.name in outputs:
            raise ValueError("its outputs are inconsistent")
        outputs[output.name] = _immutable(bytes(stored[start:end]), output.datatype, output.shape)
    if end != len(stored):
        raise ValueError("it has trailing bytes")
    return _measure(outputs, dict(head.parameters))


def _immutable(data: bytes, datatype: DataType, shape: tuple[int, ...]) -> Array:
    array = from_wire(data, datatype, shape)
    part: object = array
    while isinstance(part, np.ndarray):
        part.flags.writeable = False
        part = part.base
    return array


def _measure(outputs: dict[str, Array], parameters: Parameters) -> CachedAnswer:
    size = _ENTRY_BYTES
    for name, array in outputs.items():
        size += _OUTPUT_BYTES + sys.getsizeof(name) + array.nbytes
        if array.dtype == np.object_:
            size += sum(_ELEMENT_BYTES + len(element) for element in array.reshape(-1).tolist())
    for name, value in parameters.items():
        size += _PARAMETER_BYTES + sys.getsizeof(name) + sys.getsizeof(value)
    return CachedAnswer(outputs, parameters, size)
