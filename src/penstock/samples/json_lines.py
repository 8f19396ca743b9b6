"""Samples in a file of JSON lines: one object per line, with a value for each input."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InvalidData


def json_lines(path: Path) -> Iterator[Any]:
    """The objects of a file, one per line. Empty lines are skipped. Raises InvalidData for a line that is not JSON."""
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # noqa: PLW2901
            if not line.strip():
                continue
            try:
                found = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidData(
                    f"'{path}', line {number} is not JSON: {error}", "write one JSON object per line"
                ) from None
            if not isinstance(found, dict):
                raise InvalidData(
                    f"'{path}', line {number} is not a JSON object", 'write lines like {"input": [1, 2], "labels": 0}'
                )
            yield found
