"""Values that flow between the steps of a pipeline, and their declared types.

A value belongs to one item (one picture, one sentence), so it has no batch dimension. It is an array, text (``str``), the content of a
file (``bytes``), or a list of values of one type, such as the crops of all boxes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, InvalidInput, quoted
from penstock.tensor import Array, DataType, TensorSpec, as_bytes

Value = Any
"""An array, text, the content of a file, or a list of values."""


class Media(enum.Enum):
    """What a value is."""

    TENSOR = "tensor"
    """An array of numbers."""
    IMAGE = "image"
    """The pixels of a picture: UINT8 of shape [height, width, channels], or FP32 after ``normalise``."""
    AUDIO = "audio"
    """Samples of sound: FP32 of shape [samples], in -1 to 1."""
    TEXT = "text"
    """A ``str``."""
    FILE = "file"
    """The content of a file, such as a JPEG: ``bytes``."""


class ValueType(msgspec.Struct, frozen=True):
    """Type of a value. A dimension of -1 may have any size. Text and files have the datatype BYTES and the shape []."""

    media: Media = Media.TENSOR
    datatype: DataType = DataType.FP32
    shape: tuple[int, ...] = ()
    many: bool = False
    """True for a list of such values."""
    colour: str = ""
    """Order of an image's channels: ``rgb``, ``bgr``, ``grey`` or ``rgba``. Empty if unknown."""
    rate: int = 0
    """Samples of sound per second; 0 if unknown."""
    count: int = -1
    """Number of elements of a list; -1 if it varies or is unknown."""

    def fits(self, wanted: ValueType) -> bool:
        """True if a value of this type can be read where ``wanted`` is declared."""
        if (self.media, self.many, self.datatype) != (wanted.media, wanted.many, wanted.datatype):
            is_number = {self.media, wanted.media} <= {Media.TENSOR, Media.IMAGE, Media.AUDIO}
            if not is_number or (self.many, self.datatype) != (wanted.many, wanted.datatype):
                return False
        return len(self.shape) == len(wanted.shape) and all(
            one == two or -1 in (one, two) for one, two in zip(self.shape, wanted.shape, strict=True)
        )

    def joined(self, other: ValueType) -> ValueType:
        """The type of a value that has either this type or the type ``other``, which it fits."""
        shape = tuple(one if one == two else -1 for one, two in zip(self.shape, other.shape, strict=True))
        return ValueType(
            media=self.media if self.media is other.media else Media.TENSOR,
            datatype=self.datatype,
            shape=shape,
            many=self.many,
            colour=self.colour if self.colour == other.colour else "",
            rate=self.rate if self.rate == other.rate else 0,
            count=self.count if self.count == other.count else -1,
        )

    def __str__(self) -> str:
        if self.media is not Media.TENSOR and self.datatype is DataType.BYTES:
            shown = self.media.value
        else:
            shown = f"{self.media.value} {self.datatype.value} {list(self.shape)}"
        return f"list of {shown}" if self.many else shown


TEXT = ValueType(Media.TEXT, DataType.BYTES)
FILE = ValueType(Media.FILE, DataType.BYTES)
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
            raise _wrong_input(name, "a text", value)
        return value
    if kind.datatype is DataType.BYTES and kind.media is not Media.TENSOR:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, np.ndarray) and kind.media in _ARRAYS:
            return in_order(value)
        raise _wrong_input(name, f"the content of a file{_or_array(kind.media)}", value)
    if not isinstance(value, np.ndarray):
        raise _wrong_input(name, "an array", value)
    TensorSpec(name, kind.datatype, kind.shape).check(value)
    return in_order(value)


def in_order(array: Array) -> Array:
    """``array`` contiguous in memory, as one that was sent: numpy adds the numbers of a view in another order, with other bits."""
    return np.asarray(array, order="C")


def _or_array(media: Media) -> str:
    return f", or an array of {_ARRAYS[media]}" if media in _ARRAYS else ""


def _wrong_input(name: str, wanted: str, value: Value) -> InvalidArgument:
    hint = "pass its content, read()" if hasattr(value, "read") else ""
    if type(value).__module__.startswith("PIL."):
        hint = "pass numpy.asarray(picture.convert('RGB'))"
    return InvalidArgument(f"input '{name}' must be {wanted}, not {type(value).__name__}", hint)


def read_array(value: Any, datatype: DataType) -> Array:
    """The array of the numbers in ``value``, which are lists as in JSON. Raises ValueError if ``datatype`` cannot hold them."""
    try:
        found = np.asarray(value)
        with np.errstate(over="raise", invalid="raise"):
            array = found.astype(datatype.dtype)
    except (ValueError, TypeError, OverflowError, FloatingPointError) as error:
        raise ValueError(str(error)) from None
    if found.dtype.kind not in "biuf" or (not datatype.is_float and not np.array_equal(found, array)):
        raise ValueError("a value is not a number of this type")
    return array


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
    return in_order(array)


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
