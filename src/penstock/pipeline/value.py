"""Values that flow between the steps of a pipeline, and their declared types.

A value belongs to one item (one picture, one sentence), so it has no batch dimension. It is an array, text (``str``), the content of a
file (``bytes``), or a list of values of one type, such as the crops of all boxes.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from penstock.errors import InvalidArgument, InvalidInput
from penstock.tensor import Array, DataType, as_bytes

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
    """True for a list of any number of such values."""
    colour: str = ""
    """Order of an image's channels: ``rgb``, ``bgr``, ``grey`` or ``rgba``. Empty if unknown."""
    rate: int = 0
    """Samples of sound per second; 0 if unknown."""

    def fits(self, wanted: ValueType) -> bool:
        """True if a value of this type can be read where ``wanted`` is declared."""
        if (self.media, self.many, self.datatype) != (wanted.media, wanted.many, wanted.datatype):
            is_number = {self.media, wanted.media} <= {Media.TENSOR, Media.IMAGE, Media.AUDIO}
            if not is_number or (self.many, self.datatype) != (wanted.many, wanted.datatype):
                return False
        return len(self.shape) == len(wanted.shape) and all(
            one == two or -1 in (one, two) for one, two in zip(self.shape, wanted.shape, strict=True)
        )

    def __str__(self) -> str:
        if self.media is not Media.TENSOR and self.datatype is DataType.BYTES:
            shown = self.media.value
        else:
            shown = f"{self.media.value} {self.datatype.value} {list(self.shape)}"
        return f"list of {shown}" if self.many else shown


TEXT = ValueType(Media.TEXT, DataType.BYTES)
FILE = ValueType(Media.FILE, DataType.BYTES)


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
