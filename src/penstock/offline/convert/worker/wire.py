"""Messages between ``RemoteSource`` and the process that runs the framework.

::

    frame   length of the header (4 bytes) · length of the body (8 bytes) · header · body
    header  one message in MessagePack, in which an array is [datatype, shape, bytes in the body]
    body    the wire forms of the arrays in the order of the header, each padded to 16 bytes

The process runs foreign code, so its answers are untrusted: no pickles, lengths have limits, and every field has a type.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, UnsupportedOperator
from penstock.offline.convert.tree_arrays import TreeArrays
from penstock.tensor import Array, DataType, Signature, from_wire, to_wire

PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT = 16
_Head = tuple[DataType, tuple[int, ...], int]


class Open(msgspec.Struct, tag=True):
    format: str
    source: Path
    options: ConvertOptions


class Compute(msgspec.Struct, tag=True):
    inputs: dict[str, Array]


class Values(msgspec.Struct, tag=True):
    inputs: dict[str, Array]
    names: tuple[str, ...]


class Probe(msgspec.Struct, tag=True):
    seed: int
    brief: bool = False


class Trees(msgspec.Struct, tag=True):
    pass


class Export(msgspec.Struct, tag=True):
    target: Path
    opset: int


class Opened(msgspec.Struct, tag=True):
    framework: str
    version: str
    signature: Signature
    axes: dict[str, tuple[Axis, ...]]
    notes: tuple[str, ...]
    """Protections that the operating system does not permit, one sentence each."""


class Arrays(msgspec.Struct, tag=True):
    arrays: dict[str, Array]


class Calls(msgspec.Struct, tag=True):
    calls: tuple[dict[str, Array], ...]
    notes: tuple[str, ...] = ()


class Forests(msgspec.Struct, tag=True):
    forests: tuple[TreeArrays, ...]


class Written(msgspec.Struct, tag=True):
    exported: Exported


class Refused(msgspec.Struct, tag=True):
    """A call raised an error. ``kind`` is the name of its class."""

    kind: str
    message: str
    hint: str = ""
    operators: tuple[UnsupportedOperator, ...] = ()


Question = Open | Compute | Values | Probe | Trees | Export
Answer = Opened | Arrays | Calls | Forests | Written | Refused


def encode(message: Question | Answer) -> list[bytes | memoryview]:
    """The parts of one frame. Raises Unsupported for an array that has no datatype of the protocol."""
    body: list[bytes | memoryview] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"{type(value).__name__} in a message")
        array = np.asarray(value)  # frameworks return some scalars as numbers of numpy
        data = to_wire(array)
        body.append(data)
        body.append(bytes(-len(data) % _ALIGNMENT))
        return DataType.from_numpy(array.dtype), array.shape, len(data)

    header = msgspec.msgpack.Encoder(enc_hook=plain).encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidArgument(f"a message of {len(header)} bytes exceeds the limit of {MAX_HEADER_BYTES} bytes")
    return [PREFIX.pack(len(header), sum(map(len, body))), header, *body]


def decode(header: bytes | bytearray, body: bytearray, kinds: Any) -> Any:
    """The message of a frame, which must be one of ``kinds``. Its arrays are views of ``body``. Raises InvalidData."""
    position = 0

    def rich(kind: Any, value: Any) -> Any:
        nonlocal position
        if kind is Path:
            return Path(msgspec.convert(value, str))
        datatype, shape, size = msgspec.convert(value, _Head)
        if not 0 <= size <= len(body) - position:
            raise ValueError(f"an array of {size} bytes, but {len(body) - position} are left")
        array = from_wire(memoryview(body)[position : position + size], datatype, shape)
        position += size + -size % _ALIGNMENT
        return array

    try:
        message = msgspec.msgpack.decode(header, type=kinds, dec_hook=rich)
        if position != len(body):
            raise ValueError(f"{len(body) - position} bytes are left over")
    except (ValueError, TypeError, RecursionError, InvalidArgument, msgspec.MsgspecError) as error:
        raise InvalidData(f"malformed message: {error}") from None
    return message
