"""``ZooModel``: how to make one model of the zoo, and how a user would convert it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from penstock.offline.convert.base import ConvertOptions

if TYPE_CHECKING:  # ``convert_once`` measures exports without it
    from penstock.offline.convert.convert import ConvertKeywords

_PLAIN = ConvertOptions()


class ZooModel(NamedTuple):
    """One model. Each file of this folder has a dictionary ``MODELS`` of them by name; frameworks are imported inside ``make``."""

    format: str
    """The format that ``penstock convert`` must detect; a key of ``FORMATS``."""
    make: Callable[[Path], object]
    """Writes the model below the folder, seeded, and returns what the user would give: a path, ``module:callable``, or an object."""
    options: ConvertOptions = _PLAIN
    diagnosis: str = ""
    """Part of the error message, if the model cannot be converted. Empty: it can."""


def keywords(options: ConvertOptions) -> ConvertKeywords:
    """``options`` as the keywords of ``penstock.convert``."""
    found: dict[str, Any] = msgspec.structs.asdict(options)
    return cast("ConvertKeywords", {key: value for key, value in found.items() if value != getattr(_PLAIN, key)})
