"""Tensors in the JSON of the Open Inference Protocol: lists of values. Lists are flat in responses, and flat or nested in requests.

BYTES elements are strings. FP16 and BF16 have no JSON form. Infinities and NaN are written as ``Infinity`` and ``NaN``. These are not
valid JSON, but clients can read them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.errors import InvalidArgument
from penstock.online.server.http.codec.large_json import converted
from penstock.online.server.to_thread import Steps, finish
from penstock.tensor import Array, DataType, as_bytes, element_count

_MAX_PACKERS = 1024
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_PIECE = 16 << 10
"""Number of elements to encode per step. A step takes less than a millisecond. If the array contains NaN or infinities, a step
encodes a quarter of this number."""
_PIECE_BYTES = 256 << 10
"""Bytes of text to encode per step. A step takes one or two milliseconds."""
_ELEMENT_BYTES = 32
"""Maximum bytes of a number as text."""


class _Packers(dict[int, struct.Struct]):
    """Cached packers of lists of numbers, by length."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    def __missing__(self, count: int) -> struct.Struct:
        if len(self) >= _MAX_PACKERS:
            self.clear()
        self[count] = packer = struct.Struct(f"<{count}{self._letter}")
        return packer


class _Form:
    """The conversion of one datatype."""

    def __init__(self, datatype: DataType, letter: str, kind: Any) -> None:
        """``letter`` is the format character of ``struct``, empty for BYTES; ``kind`` is the type of a list of elements."""
        self.dtype: Any = datatype.dtype
        self.packers = _Packers(letter) if letter else None
        self.kind = kind


_FORMS = {
    "BOOL": _Form(DataType.BOOL, "?", list[bool]),
    "UINT8": _Form(DataType.UINT8, "B", list[int]),
    "UINT16": _Form(DataType.UINT16, "H", list[int]),
    "UINT32": _Form(DataType.UINT32, "I", list[int]),
    "UINT64": _Form(DataType.UINT64, "Q", list[int]),
    "INT8": _Form(DataType.INT8, "b", list[int]),
    "INT16": _Form(DataType.INT16, "h", list[int]),
    "INT32": _Form(DataType.INT32, "i", list[int]),
    "INT64": _Form(DataType.INT64, "q", list[int]),
    "FP32": _Form(DataType.FP32, "f", list[float]),
    "FP64": _Form(DataType.FP64, "d", list[float]),
    "BYTES": _Form(DataType.BYTES, "", list[str]),
}


def from_json(
    name: str, datatype: str, shape: Sequence[int], values: list[Any] | Array, is_checked: bool = False
) -> Array:
    """Convert ``values`` to an array of ``datatype``. The number of values must match ``shape``, but the nesting need not.

    ``values`` may also be an array from ``large_json``. ``is_checked`` means that the values already have a suitable type. Raises
    InvalidArgument with ``name`` in the message.
    """
    form = _FORMS.get(datatype)
    if form is None:
        raise InvalidArgument(f"input '{name}': {datatype} has no JSON form", "send it as binary data")
    if type(values) is list:
        if values and type(values[0]) is list:
            values = _flatten(name, values)
    elif isinstance(values, np.ndarray):
        values = values.reshape(-1)
    # Checked before memory is allocated for the declared shape, against the actual number of values in the body.
    count = math.prod(shape)
    if len(values) != count:
        raise InvalidArgument(
            f"input '{name}' of shape {list(shape)} needs {count} elements, but 'data' has {len(values)}"
        )
    if not count:
        # The number of values limits all shapes except empty shapes, whose other dimensions may overflow.
        element_count(shape)
    try:
        if not is_checked:
            if isinstance(values, np.ndarray):
                return _fit(name, datatype, values).reshape(shape)
            # Packing alone would accept true as 1.
            values = msgspec.convert(values, form.kind)
        if form.packers is None:
            array = np.empty(count, np.object_)
            array[:] = [value.encode() for value in values]
            return array.reshape(shape)
        # Three times as fast as np.array, which would also turn out-of-range values into infinity.
        return np.ndarray(shape, form.dtype, form.packers[count].pack(*values))
    except (OverflowError, struct.error, msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"the data of input '{name}' do not fit {datatype}: {error}") from None


def _flatten(name: str, values: list[Any]) -> list[Any]:
    while values and type(values[0]) is list:
        if set(map(type, values)) != {list}:
            raise InvalidArgument(f"the data of input '{name}' are nested unevenly")
        values = list(chain.from_iterable(values))
    return values


def _fit(name: str, datatype: str, values: Array) -> Array:
    """Convert ``values``, a flat array that ``large_json`` returned, to ``datatype``. The result may take its place in memory.

    Raises InvalidArgument.
    """
    dtype, kind = DataType(datatype).dtype, values.dtype.kind
    if dtype.kind in "iu" and kind in "iu":
        known = np.iinfo(dtype)
        if values.min(initial=0) >= known.min and values.max(initial=0) <= known.max:
            return converted(values, dtype)
        raise InvalidArgument(f"the data of input '{name}' do not fit {datatype}: a number is too large")
    if dtype.kind == "f" and kind in "iuf":
        with np.errstate(over="ignore"):
            array = converted(values, dtype)
        if array.itemsize < values.itemsize and _overflows(values, array):
            raise InvalidArgument(f"the data of input '{name}' do not fit {datatype}: a number is too large")
        return array
    if dtype.kind == kind:
        return values
    raise InvalidArgument(f"the data of input '{name}' do not fit {datatype}: its elements have another type")


def _overflows(values: Array, array: Array) -> bool:
    """True if numbers in ``values`` have become infinities in ``array``. Compares in short pieces, to need little memory."""
    parts = [slice(start, start + _PIECE) for start in range(0, array.size, _PIECE)]
    return any(not np.array_equal(np.isinf(array[part]), np.isinf(values[part])) for part in parts)


def to_json(name: str, array: Array) -> bytes:
    """The flat values of output ``name``. Raises InvalidArgument if they have no JSON form."""
    if array.size > _PIECE:
        return b"".join(finish(to_pieces(name, array)))
    if array.dtype.itemsize == 2 and (datatype := DataType.from_numpy(array.dtype)).is_float:
        raise InvalidArgument(f"output '{name}': {datatype.value} has no JSON form", "request it with 'binary_data'")
    try:
        data = orjson.dumps(array.ravel(), option=_NUMPY)
    except TypeError:
        pass  # orjson does not support BYTES
    else:
        # orjson writes NaN and infinities as null.
        return json.dumps(array.ravel().tolist(), separators=(",", ":")).encode() if b"null" in data else data
    try:
        return orjson.dumps([as_bytes(element).decode() for element in array.ravel().tolist()])
    except UnicodeDecodeError:
        raise InvalidArgument(f"output '{name}' is not UTF-8 text", "request it with 'binary_data'") from None


def to_pieces(name: str, array: Array) -> Steps[list[bytes]]:
    """Encode the flat values of output ``name`` in short steps. Returns the parts. Raises the same errors as ``to_json``."""
    flat, held, parts = array.reshape(-1), 0, [b"["]
    is_text = array.dtype.hasobject
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        yield held + _ELEMENT_BYTES * piece.size
        for small in _split_texts(piece) if is_text else _split_numbers(piece):
            parts += (b"," if len(parts) > 1 else b"", to_json(name, small)[1:-1])
            held += len(parts[-1])
            if is_text:
                yield held + _PIECE_BYTES
    return [*parts, b"]"]


def _split_numbers(piece: Array) -> list[Array]:
    if piece.dtype.kind != "f" or np.isfinite(piece).all():
        return [piece]
    return np.array_split(piece, 4)


def _split_texts(piece: Array) -> Iterator[Array]:
    """Split ``piece`` into parts of about ``_PIECE_BYTES`` bytes."""
    start = size = 0
    for place, element in enumerate(piece.tolist()):
        size += len(element)
        if size > _PIECE_BYTES:
            yield piece[start : place + 1]
            start, size = place + 1, 0
    if start < piece.size:
        yield piece[start:]
