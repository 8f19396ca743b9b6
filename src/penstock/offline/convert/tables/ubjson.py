"""Reads Universal Binary JSON (https://ubjson.org, draft 12), in which XGBoost saves models. XGBoost crashes on damaged files."""

from __future__ import annotations

from typing import Any

import numpy as np

_NUMBERS = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
_SIZES = frozenset("iUIlL")
_CONSTANTS = {"T": True, "F": False, "Z": None}
_DEEPEST = 32


def read_ubjson(data: bytes) -> Any:
    """The value in ``data``. Raises ValueError if there is anything else than one well-formed value."""
    reader = _Reader(data)
    found = reader.value(reader.marker(), 0)
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes follow the model")
    return found


class _Reader:
    """Reads values from ``at`` on."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def marker(self) -> str:
        return chr(self._bytes(1)[0])

    def value(self, marker: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        if marker in _NUMBERS:
            return self._numbers(marker, 1)[0]
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker == "S":
            return self._text(self.marker())
        if marker == "[":
            return self._array(depth)
        if marker == "{":
            return self._object(depth)
        raise ValueError(f"byte {self.at - 1} is no type: {marker!r}")

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._header()
        if kind is not None:
            if kind not in _NUMBERS:
                raise ValueError(f"byte {self.at} follows an array of the unusual type {kind!r}")
            return self._numbers(kind, count or 0)
        found: list[Any] = []
        while count is None or len(found) < count:
            marker = self.marker()
            if count is None and marker == "]":
                break
            found.append(self.value(marker, depth + 1))
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (marker := self.marker()) != "}":
            name = self._text(marker)
            found[name] = self.value(self.marker(), depth + 1)
        return found

    def _header(self) -> tuple[str | None, int | None]:
        """The type and the number of the elements of an array, if they are given."""
        kind = None
        if self._data[self.at : self.at + 1] == b"$":
            self.at += 1
            kind = self.marker()
        if self._data[self.at : self.at + 1] == b"#":
            self.at += 1
            return kind, self._size(self.marker())
        if kind is not None:
            raise ValueError(f"an array has no size at byte {self.at}")
        return None, None

    def _text(self, marker: str) -> str:
        return self._bytes(self._size(marker)).decode()

    def _size(self, marker: str) -> int:
        if marker not in _SIZES:
            raise ValueError(f"byte {self.at - 1} is no size: {marker!r}")
        return int(self._numbers(marker, 1)[0])

    def _numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return list(np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist())

    def _bytes(self, count: int) -> bytes:
        if not 0 <= count <= len(self._data) - self.at:
            raise ValueError(f"it ends at byte {len(self._data)}, inside a value of {count} bytes at byte {self.at}")
        self.at += count
        return self._data[self.at - count : self.at]
