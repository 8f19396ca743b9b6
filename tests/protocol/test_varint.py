from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.varint import read_varint, write_varint


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_it_reads_and_writes_as_protobuf_does(value: int, before: bytes, after: bytes) -> None:
    number = _VarintBytes(value)
    assert write_varint(value) == number
    data = before + number + after
    assert read_varint(data, len(before), len(data)) == (value, len(before) + len(number))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\xff" * 10, b"\xff" * 20])
def test_a_number_that_does_not_end(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"unterminated varint at byte {min(len(data), 10)}$"):
        read_varint(data, 0, len(data))


def test_what_lies_beyond_the_end_is_not_read() -> None:
    with pytest.raises(ValueError, match="unterminated varint at byte 1"):
        read_varint(b"\x80\x01", 0, 1)
