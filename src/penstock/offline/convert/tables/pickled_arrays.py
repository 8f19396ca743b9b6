"""Arrays of numpy in a pickle, rebuilt without numpy's own functions for pickles.

Those trust the pickle: with changed flags of a type, or with the class ``ndarray`` as a function, bytes become pointers. The functions
here check each state first, and never change the type of an array that exists.
"""

from __future__ import annotations

import math
from pickle import UnpicklingError
from typing import Any

import numpy as np

from penstock.tensor import Array

_ALIGNED = 0x80
"""The flag of a structure with the layout of C."""


class NdArray:
    """Stands for ``numpy.ndarray``, which can only be an argument."""


class JoblibArray:
    """Stands for the object that joblib writes before the bytes of an array."""

    shape: tuple[int, ...] = ()
    order = "C"
    dtype: np.dtype[Any] = np.dtype("V")
    numpy_array_alignment_bytes: int | None = None


def new_dtype(text: str, *_: object) -> np.dtype[Any]:
    """The type ``text``. Its layout follows as a state."""
    if not isinstance(text, str):
        raise UnpicklingError("a type of arrays has no name")
    return np.dtype(text)


def dtype_of(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """``dtype`` with the layout of ``state``. The flags of the state are not used, because they follow from the rest."""
    _, order, part, names, fields, size, _, flags, *metadata = state
    layout: Any
    if names is not None:
        columns = [fields[name] for name in names]
        layout = {
            "names": list(names),
            "formats": [_checked(column[0]) for column in columns],
            "offsets": [column[1] for column in columns],
            "itemsize": size,
        }
    elif part is not None:
        layout = _checked(part[0]), part[1]
    elif metadata:  # of times
        unit, number = metadata[0][1][:2]
        layout = f"{order}{dtype.kind}8[{number}{unit.decode()}]"
    else:
        layout = dtype.newbyteorder(order)
    found: np.dtype[Any] = np.dtype(layout, align=bool(flags & _ALIGNED))
    return found


def new_array(kind: object, *_: object) -> Array:
    """An empty array. Its content follows as a state."""
    if kind is not NdArray:
        raise UnpicklingError("an array of an unknown class")
    return np.empty(0, np.int8)


def check_array(array: Array, state: Any) -> None:
    """Raise UnpicklingError unless ``state`` is a valid first state of ``array``."""
    _, shape, dtype, _, content = state
    count = math.prod(_sizes(shape))
    if _checked(dtype).hasobject:
        is_valid = isinstance(content, list) and len(content) == count
    else:
        is_valid = isinstance(content, bytes | bytearray) and len(content) == count * dtype.itemsize
    if not is_valid or array.shape != (0,) or array.dtype != np.int8:
        raise UnpicklingError("the content of an array does not fit")


def from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: object) -> Array:
    """The array that protocol 5 writes."""
    return np.frombuffer(content, _checked(dtype)).reshape(_sizes(shape), order=order)


def scalar(dtype: Any, content: Any) -> Any:
    """A number of numpy."""
    if _checked(dtype).hasobject or len(content) != dtype.itemsize:
        raise UnpicklingError("the content of a number does not fit")
    return np.frombuffer(content, dtype)[0] if dtype.itemsize else dtype.type()


def encode(text: str, encoding: str) -> bytes:
    """Bytes, as protocols before 3 write them."""
    if encoding != "latin1":
        raise UnpicklingError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _checked(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype):
        raise UnpicklingError("an array has no type")
    return dtype


def _sizes(shape: Any) -> tuple[int, ...]:
    if not all(isinstance(size, int) and 0 <= size < 1 << 48 for size in shape):
        raise UnpicklingError("an array has a wrong shape")
    return tuple(shape)
