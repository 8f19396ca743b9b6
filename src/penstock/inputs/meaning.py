"""The meaning of one input: its role, the reason for it, and the values that it takes."""

from __future__ import annotations

import enum
import math

import msgspec


class Role(enum.Enum):
    """The kind of data that an input takes."""

    IMAGE = "image"
    IMAGE_SIZE = "image size"
    TOKEN_IDS = "token ids"  # noqa: S105 - no password
    TOKEN_TYPES = "token types"  # noqa: S105 - no password
    POSITIONS = "positions"
    MASK = "mask"
    LENGTHS = "lengths"
    AUDIO = "audio"
    SPECTRUM = "spectrum"
    """Audio features by frame, such as a mel spectrogram."""
    SAMPLING_RATE = "sampling rate"
    STATE = "state"
    FEATURES = "features"
    """Columns of a table."""
    TEXT = "text"
    SCALAR = "scalar"
    TENSOR = "tensor"
    """No sign of the meaning was found."""


class Meaning(msgspec.Struct, frozen=True):
    """What one input seems to mean."""

    role: Role
    reason: str
    """The sign from which the role follows, in a few words."""
    low: tuple[float, ...] = ()
    """The least plausible value, either one or one for each index of the last axis; empty if unknown."""
    high: tuple[float, ...] = ()
    """The largest plausible value, in the form of ``low``. Integers include it."""
    choices: tuple[int | float | bytes, ...] = ()
    """The only values that the model distinguishes; empty if there is no such list."""
    layout: str = ""
    """The axes of an image: a selection of N, C, H and W."""
    partner: str = ""
    """For a state, the output that returns its next value. For lengths, the input that they measure."""

    @property
    def text(self) -> str:
        """The role with its values, and the reason: ``token ids 0 to 30521 (index of a table of 30522 rows)``."""
        name = f"{self.layout} {self.role.value}" if self.layout else self.role.value
        values = ""
        if self.choices:
            shown = [each.decode(errors="replace") if isinstance(each, bytes) else f"{each:g}" for each in self.choices]
            values = f" {', '.join(shown[:_SHOWN])}" + (", …" if len(shown) > _SHOWN else "")
        elif self.low and self.high and all(map(math.isfinite, (*self.low, *self.high))):
            values = f" {_number(min(self.low))} to {_number(max(self.high))}"
        partner = (
            {Role.STATE: ", returned as '{}'", Role.LENGTHS: " of '{}'"}.get(self.role, "") if self.partner else ""
        )
        return f"{name}{values}{partner.format(self.partner)} ({self.reason})"


_SHOWN = 4


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3g}"
