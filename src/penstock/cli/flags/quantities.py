"""Parsers of quantities on the command line: ``1%``, ``5ms``, ``1,16,64``."""

from __future__ import annotations

import re

from penstock.errors import InvalidArgument

_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"
_MILLISECONDS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_LONG_SECONDS = {"m": 60.0, "min": 60.0, "h": 3600.0}


def parse_share(text: str) -> float:
    """``1%`` -> 0.01, ``0.01`` -> 0.01. Raises InvalidArgument."""
    match = re.fullmatch(_NUMBER + r"(%?)\s*", text)
    if not match:
        raise InvalidArgument(f"'{text}' is not a fraction", "write it like 1% or 0.01")
    value = float(match[1])
    if not match[2]:
        if value >= 1:
            raise InvalidArgument(
                f"a fraction must be below 1 or end in %, got {text}", f"did you mean {text.strip()}%?"
            )
        return value
    if value > 100:
        raise InvalidArgument(f"a fraction must be at most 100%, got {text}", "write it like 1% or 0.01")
    return value / 100


def parse_milliseconds(text: str) -> float:
    """``5ms`` -> 5, ``0.2s`` -> 200, ``800us`` -> 0.8, ``5`` -> 5. Raises InvalidArgument."""
    match = re.fullmatch(_NUMBER + r"([a-zµ]*)\s*", text)
    if not match or match[2] not in _MILLISECONDS:
        raise InvalidArgument(f"'{text}' is not a time", "write it like 5ms, 0.2s or 800us")
    return float(match[1]) * _MILLISECONDS[match[2]]


def parse_seconds(text: str) -> float:
    """``20s`` -> 20, ``500ms`` -> 0.5, ``10m`` -> 600, ``20`` -> 20. Raises InvalidArgument."""
    match = re.fullmatch(_NUMBER + r"([a-z]+)\s*", text)
    if match and match[2] in _LONG_SECONDS:
        return float(match[1]) * _LONG_SECONDS[match[2]]
    return parse_milliseconds(text if re.search(r"[a-zµ]\s*$", text) else f"{text}s") / 1e3


def parse_counts(text: str) -> tuple[int, ...]:
    """``1,16,64`` -> (1, 16, 64), each at least 1. Raises InvalidArgument."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise InvalidArgument(f"'{text}' is not a list of whole numbers of at least 1", "write it like 1,16,64")
    return tuple(int(part) for part in parts)
