"""Tensors as the Open Inference Protocol defines them: datatypes, specs, signatures, and their wire form.

A tensor in memory is a C-ordered ``numpy.ndarray``. For a BYTES tensor, the array has dtype ``object`` and its elements are ``bytes``.
The wire form consists of the elements in little-endian row-major order. A 4-byte length precedes each BYTES element.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from penstock.errors import InvalidArgument, Unsupported, quoted

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")
MAX_RANK = 64
"""Maximum number of dimensions of a tensor: the limit of numpy."""
_MAX_ELEMENTS = 2**48


class DataType(enum.Enum):
    """An element type by its protocol name, e.g. ``DataType("FP32")``."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    BF16 = "BF16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"

    dtype: np.dtype[Any]
    """The numpy dtype of an array in memory (``object`` for BYTES)."""
    itemsize: int
    """Bytes per element on the wire; 0 for BYTES, whose elements vary in length."""
    onnx: int
    """The ``TensorProto.DataType`` number."""
    is_float: bool

    @classmethod
    def from_numpy(cls, dtype: np.dtype[Any]) -> DataType:
        """The datatype of arrays of ``dtype``; numpy strings count as BYTES. Raises Unsupported."""
        if dtype.kind in "OSU":
            return cls.BYTES
        try:
            return _BY_DTYPE[dtype.newbyteorder("=")]
        except KeyError:
            raise Unsupported(f"no tensor datatype for numpy dtype '{dtype}'", "convert it, e.g. to float32") from None

    @classmethod
    def from_onnx(cls, number: int) -> DataType:
        """The datatype for ``number``, a value of ``TensorProto.DataType``. Raises Unsupported."""
        try:
            return _BY_ONNX[number]
        except KeyError:
            raise Unsupported(f"ONNX element type {number} has no tensor datatype in the protocol") from None


def _describe(datatype: DataType, dtype: Any, onnx: int) -> None:
    datatype.dtype = np.dtype(dtype)
    datatype.itemsize = 0 if datatype is DataType.BYTES else datatype.dtype.itemsize
    datatype.onnx = onnx
    datatype.is_float = datatype.value.startswith(("FP", "BF"))


for _datatype, _dtype, _onnx in (
    (DataType.BOOL, np.bool_, 9),
    (DataType.UINT8, np.uint8, 2),
    (DataType.UINT16, np.uint16, 4),
    (DataType.UINT32, np.uint32, 12),
    (DataType.UINT64, np.uint64, 13),
    (DataType.INT8, np.int8, 3),
    (DataType.INT16, np.int16, 5),
    (DataType.INT32, np.int32, 6),
    (DataType.INT64, np.int64, 7),
    (DataType.FP16, np.float16, 10),
    (DataType.BF16, ml_dtypes.bfloat16, 16),
    (DataType.FP32, np.float32, 1),
    (DataType.FP64, np.float64, 11),
    (DataType.BYTES, np.object_, 8),
):
    _describe(_datatype, _dtype, _onnx)

_BY_DTYPE = {datatype.dtype: datatype for datatype in DataType}
_BY_ONNX = {datatype.onnx: datatype for datatype in DataType}


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, datatype and shape of one input or output. A dimension of -1 may have any size."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]

    def admits(self, shape: Sequence[int]) -> bool:
        """True if an array of ``shape`` fits: the rank and all fixed dimensions match."""
        if len(shape) != len(self.shape):
            return False
        return all(want in (-1, got) for want, got in zip(self.shape, shape, strict=True))

    def check(self, array: Array) -> None:
        """Raise InvalidArgument unless ``array`` has this datatype and a shape that fits."""
        if array.dtype != self.datatype.dtype:
            got, want = DataType.from_numpy(array.dtype).value, self.datatype.value
            raise InvalidArgument(
                f"inference input '{self.name}' data-type is '{got}', but model expects '{want}'",
                f"its numpy dtype is '{array.dtype}', and must be '{self.datatype.dtype}'" if got == want else "",
            )
        if not self.admits(array.shape):
            raise InvalidArgument(
                f"unexpected shape for input '{self.name}'. Expected {list(self.shape)}, got {list(array.shape)}",
                "-1 stands for any size",
            )


class Signature(msgspec.Struct, frozen=True):
    """A model's inputs and outputs, in the model's order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def batchable(self) -> bool:
        """True if the first axis of every input and output is a free batch axis, so that requests can be merged along it."""
        specs = self.inputs + self.outputs
        return bool(self.inputs) and all(spec.shape[:1] == (-1,) for spec in specs)

    @property
    def has_rows(self) -> bool:
        """True if the first axis of every input can count rows: it is free everywhere, or has the same fixed size everywhere."""
        sizes = {spec.shape[:1] for spec in self.inputs}
        return len(sizes) == 1 and sizes != {()}

    @property
    def smallest_batch(self) -> int:
        """The minimum number of rows per call: the size of the first axis if it is fixed, otherwise 1."""
        return max(1, *(spec.shape[0] for spec in self.inputs)) if self.has_rows else 1

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Raise InvalidArgument unless ``inputs`` match the signature and, if the model is batchable, have the same batch size."""
        for name in inputs:
            if all(name != spec.name for spec in self.inputs):
                raise InvalidArgument(
                    f"unexpected inference input {quoted(name)}", f"the model's inputs are {self.input_names}"
                )
        missing = [spec.name for spec in self.inputs if spec.name not in inputs]
        if missing:
            raise InvalidArgument(
                f"expected {len(self.inputs)} inputs but got {len(inputs)} inputs. "
                f"Got input(s) {list(inputs)}, but missing required input(s) {missing}. Please provide all required input(s)."
            )
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        if self.batchable and len({inputs[spec.name].shape[0] for spec in self.inputs}) > 1:
            sizes = {spec.name: inputs[spec.name].shape[0] for spec in self.inputs}
            raise InvalidArgument(f"inputs differ in batch size: {sizes}", "give all inputs the same first dimension")

    @property
    def input_names(self) -> list[str]:
        return [spec.name for spec in self.inputs]

    @property
    def output_names(self) -> list[str]:
        return [spec.name for spec in self.outputs]


def element_count(shape: Sequence[int]) -> int:
    """Number of elements of ``shape``. Raises InvalidArgument for a shape that no array can have."""
    if len(shape) > MAX_RANK:
        raise InvalidArgument(f"a shape of {len(shape)} dimensions exceeds the limit of {MAX_RANK} dimensions")
    if any(dim < 0 for dim in shape):
        raise InvalidArgument(f"shape {list(shape)} has a negative dimension", "every dimension must be >= 0")
    # An empty tensor takes no memory, but numpy rejects dimensions beyond the address space.
    if math.prod(dim for dim in shape if dim) > _MAX_ELEMENTS:
        raise InvalidArgument(f"shape {list(shape)} is too large")
    return math.prod(shape)


def to_wire(array: Array) -> bytes | memoryview:
    """Convert ``array`` to its wire form. Returns a view if the array is contiguous and little-endian."""
    if array.dtype.kind in "OSU":
        return _bytes_to_wire(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # A view of bytes, because bfloat16 has no buffer format.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def from_wire(buffer: Buffer, datatype: DataType, shape: Sequence[int]) -> Array:
    """Read an array of ``datatype`` and ``shape`` from its wire form. Returns a read-only view; only BYTES are copied.

    Raises InvalidArgument, before memory is allocated, if ``buffer`` has the wrong size.
    """
    count = element_count(shape)
    if datatype is DataType.BYTES:
        return _bytes_from_wire(buffer, count).reshape(shape)
    expected = count * datatype.itemsize
    if expected != len(buffer):
        raise InvalidArgument(
            f"shape {list(shape)} of {datatype.value} takes {expected} bytes, but {len(buffer)} bytes were given"
        )
    if count == 0:
        return np.empty(shape, datatype.dtype)
    if datatype is DataType.BOOL and np.frombuffer(buffer, np.uint8).max() > 1:
        raise InvalidArgument("an element of a BOOL tensor must be the byte 0 or 1")
    return np.frombuffer(buffer, datatype.dtype).reshape(shape)


def as_bytes(element: Any) -> bytes:
    """One element of a BYTES tensor as bytes; text becomes UTF-8."""
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        return element.encode()
    raise InvalidArgument(f"an element of a BYTES tensor must be bytes or text, not {type(element).__name__}")


def _bytes_to_wire(array: Array) -> bytes:
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        data = as_bytes(element)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _bytes_from_wire(buffer: Buffer, count: int) -> Array:
    # Each element has at least a length field, so this detects a wrong count before memory is allocated.
    if count * _LENGTH.size > len(buffer):
        raise InvalidArgument(f"{count} BYTES elements do not fit in {len(buffer)} bytes")
    # Slices stop at the end of the bytes, so one check after the loop suffices. A check of each slice would take three times as long.
    data, end = bytes(buffer), 0
    elements: list[bytes] = []
    add, unpack, prefix = elements.append, _LENGTH.unpack_from, _LENGTH.size
    try:
        for _ in range(count):
            (length,) = unpack(data, end)
            start = end + prefix
            end = start + length
            add(data[start:end])
    except struct.error:
        end = -1
    if end != len(data):
        raise _bytes_error(data, count)
    array = np.empty(count, np.object_)
    array[:] = elements
    return array


def _bytes_error(data: bytes, count: int) -> InvalidArgument:
    """Return the error that describes the first fault in the wire form of BYTES elements."""
    offset = 0
    for index in range(count):
        left = len(data) - offset - _LENGTH.size
        if left < 0:
            return InvalidArgument(f"BYTES element {index} of {count} is truncated")
        (length,) = _LENGTH.unpack_from(data, offset)
        if length > left:
            return InvalidArgument(f"BYTES element {index} declares {length} bytes, but {left} are left")
        offset += _LENGTH.size + length
    return InvalidArgument(f"{len(data) - offset} bytes are left over after {count} BYTES elements")
