"""Tensors as Triton's Python models see them, and the names of their types."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import PenstockError, Unsupported
from penstock.tensor import Array, DataType, TensorSpec, from_wire, to_wire

_STRING = "TYPE_STRING"
_NUMBERED = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
    "BF16",
)
"""In the order of the schema's numbers, from 1."""
_MAX_ELEMENTS = 1 << 24
"""Of a BYTES output."""


class TritonModelException(Exception):
    """What is wrong with how a model uses this interface."""


class Tensor:
    """A named array. That of an input may be read until ``execute`` returns, and by a decoupled model for as long as it likes."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor '{name}' needs a numpy array, not a {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "UV" and numpy_array.dtype.name != "bfloat16":
            raise TritonModelException(f"tensor '{name}' has dtype {numpy_array.dtype}; for strings use np.object_")
        self._name = name
        self._array = numpy_array

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """``tensor`` without a copy: an object with ``__dlpack__``, or a capsule, in main memory."""
        try:
            return cls(name, np.from_dlpack(tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)))
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be taken over DLPack: {error}") from None

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True


class _Capsule:
    """A DLPack capsule of main memory as numpy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """``TYPE_FP32`` is ``numpy.float32``, and so on."""
    name = "BYTES" if triton_type_string == _STRING else triton_type_string.removeprefix("TYPE_")
    return DataType(name).dtype.type


def triton_to_numpy_type(data_type: int) -> Any:
    """As ``triton_string_to_numpy`` by the schema's number."""
    return DataType(_NUMBERED[data_type - 1]).dtype.type if 1 <= data_type <= len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The schema's number of a dtype; None if it has none."""
    try:
        return _NUMBERED.index(DataType.from_numpy(np.dtype(data_type)).value) + 1
    except Unsupported:
        return None


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """The elements, each behind its length; None if there are none."""
    return bytes(to_wire(input_tensor)) if input_tensor.size else None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The elements of ``serialize_byte_tensor``, in one dimension."""
    count = offset = 0
    while offset + 4 <= len(encoded_tensor):
        offset += 4 + int.from_bytes(encoded_tensor[offset : offset + 4], "little")
        count += 1
    return from_wire(encoded_tensor, DataType.BYTES, (count,))


def check_output(spec: TensorSpec, array: Array, has_shape: bool = True) -> None:
    """Raise PenstockError unless ``array`` is what ``spec`` says; ``has_shape``: also in its shape."""
    begin = f"the model's output '{spec.name}'"
    try:
        datatype = DataType.from_numpy(array.dtype)
    except Unsupported:
        raise PenstockError(f"{begin} has dtype {array.dtype}, and must be {spec.datatype.value}") from None
    if datatype is not spec.datatype:
        raise PenstockError(f"{begin} is {datatype.value}, and must be {spec.datatype.value}")
    if has_shape and not spec.admits(array.shape):
        raise PenstockError(f"{begin} has shape {list(array.shape)}, and must have {list(spec.shape)}")
    if datatype is DataType.BYTES:
        if array.size > _MAX_ELEMENTS:
            raise PenstockError(f"{begin} has {array.size} elements, more than the {_MAX_ELEMENTS} that one may have")
        if array.dtype.kind == "O":
            for element in array.flat:
                if not isinstance(element, bytes | str):
                    raise PenstockError(f"{begin} holds a {type(element).__name__}, and must hold bytes or text")
