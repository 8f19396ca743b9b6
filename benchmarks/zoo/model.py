"""``ZooModel``: how to make one model of the zoo, and how a user would convert it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock.offline.convert.base import ConvertOptions


class ZooModel(NamedTuple):
    """One model. Each file of this folder has a dictionary ``MODELS`` of them by name; frameworks are imported inside ``make``."""

    format: str
    """The format that ``penstock convert`` must detect; a key of ``FORMATS``."""
    make: Callable[[Path], object]
    """Writes the model below the folder, seeded, and returns what the user would give: a path, ``module:callable``, or an object."""
    options: ConvertOptions = ConvertOptions()
    diagnosis: str = ""
    """Part of the error message, if the model cannot be converted. Empty: it can."""
