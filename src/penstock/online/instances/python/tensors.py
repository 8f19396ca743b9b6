"""Tensors of Triton Python models, the numbers of datatypes in Triton's schema, and checks of a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import PenstockError, Unsupported
from penstock.tensor import Array, DataType, TensorSpec

_NUMBERED = [*(one for one in DataType if one is not DataType.BF16), DataType.BF16]
"""The datatypes in the order of their numbers in Triton's schema, which start at 1."""
_MAX_ELEMENTS = 1 << 24
"""Maximum number of elements of a BYTES output."""


class TritonModelException(Exception):
    """Raised if a model uses this interface incorrectly."""


class TritonTensor:
    """A named array. The array of an input is valid until ``execute`` returns. For decoupled models, it is valid longer."""

    def __init__(self, name: str, numpy_array: Array) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"tensor '{name}' needs a numpy array, not a {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "UV" and numpy_array.dtype.name != "bfloat16":
            raise TritonModelException(f"tensor '{name}' has dtype {numpy_array.dtype}; for strings use np.object_")
        self._name = name
        self._array = numpy_array

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> TritonTensor:
        """Wrap ``tensor``, an object with ``__dlpack__`` in main memory, without a copy."""
        try:
            return cls(name, np.from_dlpack(tensor))
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be read through DLPack: {error}") from None

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
"""Models import the class under this name."""


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a name such as ``TYPE_FP32``."""
    return datatype_of(triton_type_string).dtype.type


def datatype_of(word: str) -> DataType:
    """The datatype with the name ``word`` in Triton's schema. Raises ValueError."""
    return DataType.BYTES if word == "TYPE_STRING" else DataType(word.removeprefix("TYPE_"))


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type for a datatype number of Triton's schema, or None."""
    return _NUMBERED[data_type - 1].dtype.type if 1 <= data_type <= len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The datatype number of a numpy dtype in Triton's schema, or None."""
    try:
        return _NUMBERED.index(DataType.from_numpy(np.dtype(data_type))) + 1
    except Unsupported:
        return None


def check_output(spec: TensorSpec, array: Array) -> None:
    """Raise PenstockError unless ``array`` has the datatype and shape of ``spec``."""
    check_type(spec.name, array, spec.datatype)
    if not spec.admits(array.shape):
        shapes = f"has shape {list(array.shape)}, must have {list(spec.shape)}"
        raise PenstockError(f"the model's output '{spec.name}' {shapes}")


def rows_of(inputs: Mapping[str, Array]) -> int | None:
    """The number of rows of a request; None if its inputs have different numbers of rows."""
    rows = {array.shape[0] if array.ndim else None for array in inputs.values()}
    return rows.pop() if len(rows) == 1 else None


def check_rows(name: str, array: Array, rows: int | None) -> None:
    """Raise PenstockError unless the output ``name`` has ``rows`` rows; None allows any number."""
    if rows is not None and array.shape[:1] != (rows,):
        found = list(array.shape)
        raise PenstockError(
            f"the model's output '{name}' has shape {found} for a request with a batch of {rows}",
            "set 'max_batch_size: 0' if outputs and inputs can have different numbers of rows",
        )


def check_type(name: str, array: Array, wanted: DataType | None = None) -> None:
    """Raise PenstockError unless the output ``name`` can be sent and has the datatype ``wanted``; None allows any datatype."""
    begin = f"the model's output '{name}'"
    try:
        datatype = DataType.from_numpy(array.dtype)
    except Unsupported:
        raise PenstockError(f"{begin} has the unsupported dtype {array.dtype}") from None
    if wanted is not None and wanted is not datatype:
        raise PenstockError(f"{begin} has datatype {datatype.value}, must have {wanted.value}")
    if datatype is DataType.BYTES:
        if array.size > _MAX_ELEMENTS:
            raise PenstockError(f"{begin} has {array.size} elements, more than the limit of {_MAX_ELEMENTS}")
        for element in array.flat if array.dtype.kind == "O" else ():
            if not isinstance(element, bytes | str):
                raise PenstockError(f"{begin} contains a {type(element).__name__}, must contain bytes or text")
