"""Tensors as Triton's Python models see them, and the names of their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import PenstockError, Unsupported
from penstock.tensor import Array, DataType, TensorSpec

_NUMBERED = [*(one for one in DataType if one is not DataType.BF16), DataType.BF16]
"""In the order of the schema's numbers, from 1."""
_MAX_ELEMENTS = 1 << 24
"""Of a BYTES output."""


class TritonModelException(Exception):
    """What is wrong with how a model uses this interface."""


class TritonTensor:
    """A named array. That of an input may be read until ``execute`` returns, and by a decoupled model for as long as it likes."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor '{name}' needs a numpy array, not a {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "UV" and numpy_array.dtype.name != "bfloat16":
            raise TritonModelException(f"tensor '{name}' has dtype {numpy_array.dtype}; for strings use np.object_")
        self._name = name
        self._array = numpy_array

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> TritonTensor:
        """``tensor``, an object with ``__dlpack__`` in main memory, without a copy."""
        try:
            return cls(name, np.from_dlpack(tensor))
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
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


Tensor = TritonTensor
"""The name that models know it by."""


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """``TYPE_FP32`` is ``numpy.float32``, and so on."""
    return datatype_of(triton_type_string).dtype.type


def datatype_of(word: str) -> DataType:
    """Of the schema's name ``word``. Raises ValueError."""
    return DataType.BYTES if word == "TYPE_STRING" else DataType(word.removeprefix("TYPE_"))


def triton_to_numpy_type(data_type: int) -> Any:
    """As ``triton_string_to_numpy`` by the schema's number."""
    return _NUMBERED[data_type - 1].dtype.type if 1 <= data_type <= len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The schema's number of a dtype; None if it has none."""
    try:
        return _NUMBERED.index(DataType.from_numpy(np.dtype(data_type))) + 1
    except Unsupported:
        return None


def check_output(spec: TensorSpec, array: Array) -> None:
    """Raise PenstockError unless ``array`` is what ``spec`` says."""
    check_type(spec.name, array, spec.datatype)
    if not spec.admits(array.shape):
        found = list(array.shape)
        raise PenstockError(f"the model's output '{spec.name}' has shape {found}, and must have {list(spec.shape)}")


def rows_of(inputs: Mapping[str, Array]) -> int | None:
    """How many rows a request has; None if its inputs do not tell."""
    rows = {array.shape[0] if array.ndim else None for array in inputs.values()}
    return rows.pop() if len(rows) == 1 else None


def check_rows(name: str, array: Array, rows: int | None) -> None:
    """Raise PenstockError unless the output ``name`` has as many ``rows`` as its request; None asks for none."""
    if rows is not None and array.shape[:1] != (rows,):
        found = list(array.shape)
        raise PenstockError(
            f"the model's output '{name}' has shape {found} for a request with a batch of {rows}",
            "if it does not answer row for row, configure 'max_batch_size: 0'",
        )


def check_type(name: str, array: Array, wanted: DataType | None = None) -> None:
    """Raise PenstockError if the output ``name`` is not of the datatype ``wanted``, or of one that no answer can hold."""
    begin = f"the model's output '{name}'"
    try:
        datatype = DataType.from_numpy(array.dtype)
    except Unsupported:
        raise PenstockError(f"{begin} is of dtype {array.dtype}, which no tensor has") from None
    if wanted is not None and wanted is not datatype:
        raise PenstockError(f"{begin} is {datatype.value}, and must be {wanted.value}")
    if datatype is DataType.BYTES:
        if array.size > _MAX_ELEMENTS:
            raise PenstockError(f"{begin} has {array.size} elements, more than the {_MAX_ELEMENTS} that one may have")
        if array.dtype.kind == "O":
            for element in array.flat:
                if not isinstance(element, bytes | str):
                    raise PenstockError(f"{begin} holds a {type(element).__name__}, and must hold bytes or text")
