"""Checks of the texts that steps read."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import wrong_type
from penstock.pipeline.value import Media, ValueType

MAX_BYTES = 1 << 20
"""Default limit of a text."""


def check_is_text(step: str, name: str, inputs: Mapping[str, ValueType]) -> None:
    """Raises InvalidConfig unless the input ``name`` is one text."""
    if inputs[name].media is not Media.TEXT or inputs[name].many:
        raise wrong_type(step, name, "a text", inputs[name])


def checked(text: str, max_bytes: int) -> str:
    """``text``. Raises InvalidInput if it takes more than ``max_bytes`` as UTF-8, or is not valid Unicode."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text has an unpaired surrogate at character {error.start}", "send valid UTF-8"
        ) from None
    if size > max_bytes:
        raise InvalidInput(
            f"the text has {size} bytes, the limit is {max_bytes}", "send a shorter text, or raise the step's max_bytes"
        )
    return text
