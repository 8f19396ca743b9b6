"""The inputs of one item: checked, and in the form that the steps read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, quoted
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType, TensorSpec

_ARRAYS = {Media.IMAGE: "pixels", Media.AUDIO: "samples"}
"""Media whose inputs may also be arrays."""


def check_inputs(types: Mapping[str, ValueType], inputs: Mapping[str, Value]) -> dict[str, Value]:
    """``inputs`` in the declared order. Raises InvalidArgument for a missing or unknown input, a wrong type or a wrong shape."""
    for name in inputs:
        if name not in types:
            raise InvalidArgument(f"unexpected input {quoted(name)}", did_you_mean(name, types))
    if missing := [name for name in types if name not in inputs]:
        raise InvalidArgument(f"input '{missing[0]}' is missing", f"the inputs are {', '.join(types)}")
    return {name: _checked(name, kind, inputs[name]) for name, kind in types.items()}


def _checked(name: str, kind: ValueType, value: Value) -> Value:
    if kind.media is Media.TEXT:
        if not isinstance(value, str):
            raise _wrong(name, "a text", value)
        return value
    if kind.datatype is DataType.BYTES and kind.media is not Media.TENSOR:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, np.ndarray) and kind.media in _ARRAYS:
            return value
        raise _wrong(name, f"the content of a file{_or_array(kind.media)}", value)
    if not isinstance(value, np.ndarray):
        raise _wrong(name, "an array", value)
    TensorSpec(name, kind.datatype, kind.shape).check(value)
    return value


def _or_array(media: Media) -> str:
    return f", or an array of {_ARRAYS[media]}" if media in _ARRAYS else ""


def _wrong(name: str, wanted: str, value: Value) -> InvalidArgument:
    is_pillow = type(value).__module__.startswith("PIL.")
    hint = "pass numpy.asarray(picture.convert('RGB'))" if is_pillow else ""
    return InvalidArgument(f"input '{name}' must be {wanted}, not {type(value).__name__}", hint)


def read_array(value: Any, datatype: DataType) -> Array:
    """The array of the numbers in ``value``, which are lists as in JSON. Raises ValueError if ``datatype`` cannot hold them."""
    try:
        found = np.asarray(value)
        with np.errstate(over="raise"):
            array = found.astype(datatype.dtype)
    except (ValueError, TypeError, OverflowError, FloatingPointError) as error:
        raise ValueError(str(error)) from None
    if found.dtype.kind not in "biuf" or (not datatype.is_float and not np.array_equal(found, array)):
        raise ValueError("a value is not a number of this type")
    return array
