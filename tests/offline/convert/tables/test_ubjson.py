"""Universal Binary JSON: the values of the specification, and every damaged form as a ValueError."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from penstock.offline.convert.tables.ubjson import read_ubjson


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"i\xff", -1),
        (b"U\xff", 255),
        (b"I\x01\x00", 256),
        (b"l\xff\xff\xff\xfe", -2),
        (b"L" + struct.pack(">q", 1 << 40), 1 << 40),
        (b"d" + struct.pack(">f", 0.5), 0.5),
        (b"D" + struct.pack(">d", 0.1), 0.1),
        (b"T", True),
        (b"Z", None),
        (b"SU\x02\xc3\xa9", "é"),
        (b"[i\x01[]T]", [1, [], True]),
        (b"[#U\x02i\x01T", [1, True]),
        (b"[$I#U\x02\x00\x01\x00\x02", [1, 2]),
        (b"[$U#U\x00", []),
        (b"{U\x01ai\x01L\x00\x00\x00\x00\x00\x00\x00\x01b{}}", {"a": 1, "b": {}}),
    ],
)
def test_values(data: bytes, value: Any) -> None:
    assert read_ubjson(data) == value
    for size in range(len(data)):
        with pytest.raises(ValueError, match="."):
            read_ubjson(data[:size])


@pytest.mark.parametrize(
    "data",
    [
        b"q",
        b"TT",
        b"Si\xff",
        b"ST",
        b"[$U#i\xff",
        b"[$S#U\x01",
        b"[$U\x01",
        b"[" * 99,
        b"{U\x01" * 99,
        b"[$L#L\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"SU\x01\xff",
    ],
)
def test_malformed_values_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        read_ubjson(data)
