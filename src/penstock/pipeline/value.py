"""Values that flow between the steps of a pipeline, and their declared types.

A value belongs to one item (one picture, one sentence), so it has no batch dimension. It is an array, text (``str``), the content of a
file (``bytes``), or a list of values of one type, such as the crops of all boxes.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from penstock.tensor import DataType

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
