"""The results of a function in Python, compared with its type hints."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidInput
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType, as_bytes


def check_result(kind: ValueType, value: Any) -> Value:
    """``value`` in the form that the steps read: a Python number becomes an array.

    Raises InvalidInput if it is not of type ``kind``.
    """
    if kind.many:
        if not isinstance(value, list | tuple):
            raise _wrong(kind, value)
        one_kind = msgspec.structs.replace(kind, many=False)
        return [check_result(one_kind, one) for one in value]
    if kind.datatype is not DataType.BYTES or kind.media is Media.TENSOR:
        return _array(kind, value)
    if not isinstance(value, str if kind.media is Media.TEXT else bytes):
        raise _wrong(kind, value)
    return _encodable(value)


def _array(kind: ValueType, value: Any) -> Array:
    dtype = kind.datatype.dtype
    try:
        array = np.asarray(value, dtype if isinstance(value, bool | int | float) else None)
    except (ValueError, OverflowError):
        raise _wrong(kind, value) from None
    if not isinstance(value, np.ndarray | np.generic | bool | int | float) or array.dtype != dtype:
        raise _wrong(kind, value)
    if array.ndim != len(kind.shape) or any(
        want not in (-1, size) for want, size in zip(kind.shape, array.shape, strict=True)
    ):
        raise _wrong(kind, value)
    if kind.datatype is DataType.BYTES:
        for element in array.reshape(-1).tolist():
            _encodable(element)
    return array


def _encodable(value: Any) -> Any:
    """``value``, if it is bytes or text that can be sent."""
    try:
        as_bytes(value)
    except UnicodeEncodeError:
        raise InvalidInput("is text that cannot be encoded: it has half a surrogate pair") from None
    except InvalidArgument as error:
        raise InvalidInput(f"has a wrong element: {error.message}") from None
    return value


def _wrong(kind: ValueType, value: Any) -> InvalidInput:
    found = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    return InvalidInput(f"is {found}, but the type hint declares {kind}", "return what the hint declares, or change it")
