"""Attempt: try a step of a build that may fail without ending the build."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

T = TypeVar("T")


def not_tried(titles: Sequence[str], reason: str) -> str:
    """A note on versions that were not made."""
    return f"{', '.join(titles)} {'was' if len(titles) == 1 else 'were'} not tried: {reason}"


def attempt(name: str, make: Callable[[], T], failures: dict[str, str]) -> T | None:
    """Return the result of ``make()``; None, with the reason in ``failures``, if it fails. A failure must not end the build."""
    try:
        return make()
    except PenstockError as error:
        failures[name] = error.message
    except Exception as error:  # noqa: BLE001 - a defect in one method
        _log.warning("%s failed", name, exc_info=True)
        failures[name] = f"internal error: {type(error).__name__}: {str(error)[:200]}"
    return None
