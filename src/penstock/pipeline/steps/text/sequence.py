"""Padding and truncation of sequences, such as token ids or samples of sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.value import Media, Value, ValueType, read_array
from penstock.tensor import Array, DataType


class PadSequence(Step, frozen=True, kw_only=True):
    """Pad an array along its first axis to a fixed length. ``mask`` is 1 for the array's own entries and 0 for padding."""

    outputs: ClassVar = ("value", "mask")

    length: Annotated[int, Meta(ge=1)]
    """The length. A longer array is refused: ``truncate_sequence`` shortens it first."""
    fill: float = 0
    """The value of the padding."""
    side: Literal["right", "left"] = "right"
    """The side on which padding is added."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The array with its new length. Raises InvalidConfig unless the input is a long enough array."""
        given = _checked("pad_sequence", inputs)
        if given.shape[0] > self.length:
            raise wrong_type("pad_sequence", "value", f"an array of at most {self.length} entries", given)
        if given.datatype is DataType.BYTES:
            raise wrong_type("pad_sequence", "value", "an array of numbers", given)
        try:
            read_array(self.fill, given.datatype)
        except ValueError:
            raise InvalidConfig(
                f"step 'pad_sequence' has 'fill: {self.fill:g}', which is no {given.datatype.value}",
                "write another number",
            ) from None
        mask = ValueType(datatype=DataType.INT64, shape=(self.length,))
        return {"value": replace(given, shape=(self.length, *given.shape[1:])), "mask": mask}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The padded array and its mask. Raises InvalidInput if the array is too long."""
        value: Array = inputs["value"]
        count = len(value)
        if count > self.length:
            raise InvalidInput(
                f"the array has {count} entries, the limit is {self.length}", "use the step truncate_sequence first"
            )
        used = slice(0, count) if self.side == "right" else slice(self.length - count, self.length)
        padded = np.full((self.length, *value.shape[1:]), self.fill, value.dtype)
        mask = np.zeros(self.length, np.int64)
        padded[used], mask[used] = value, 1
        return {"value": padded, "mask": mask}


class TruncateSequence(Step, frozen=True, kw_only=True):
    """Remove entries of an array along its first axis until it has at most ``length``."""

    length: Annotated[int, Meta(ge=1)]
    """Maximum length."""
    side: Literal["right", "left"] = "right"
    """The side on which entries are removed."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The array with its new length. Raises InvalidConfig unless the input is an array."""
        given = _checked("truncate_sequence", inputs)
        length = min(given.shape[0], self.length)  # -1 stays
        return {"value": replace(given, shape=(length, *given.shape[1:]))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The first or the last ``length`` entries."""
        value: Array = inputs["value"]
        return {"value": value[: self.length] if self.side == "right" else value[max(0, len(value) - self.length) :]}


def _checked(step: str, inputs: Mapping[str, ValueType]) -> ValueType:
    given = inputs["value"]
    if given.many or given.media in (Media.TEXT, Media.FILE) or not given.shape:
        raise wrong_type(step, "value", "an array", given)
    return given
