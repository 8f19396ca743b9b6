from __future__ import annotations

import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.varint import read_fields, read_varint, read_views, write_field, write_number, write_varint


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


FIELDS = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 2**64 - 1) | st.binary(max_size=40)), max_size=10)


@given(FIELDS)
def test_fields_are_read_as_they_were_written(fields: list[tuple[int, int | bytes]]) -> None:
    data = b""
    for number, value in fields:
        is_text = isinstance(value, bytes)
        field = write_varint(number << 3 | (2 if is_text else 0)) + write_varint(len(value) if is_text else value)
        field += value if is_text else b""
        assert field == (write_field(number, value[:3], value[3:]) if is_text else write_number(number, value))
        data += field
        data += write_varint(7 << 3 | 5) + b"1234" + write_varint(9 << 3 | 1) + b"12345678"  # skipped
    found = [(number, bytes(value) if isinstance(value, memoryview) else value) for number, value in read_fields(data)]
    assert found == fields


@pytest.mark.parametrize("data", [b"\x0a\x05abc", b"\x0b", b"\x0d12", b"\x08"])
def test_a_field_that_does_not_fit(data: bytes) -> None:
    with pytest.raises(ValueError, match="wire type|a field of|unterminated"):
        list(read_fields(data))


@given(FIELDS, st.integers(1, 1000))
def test_views_are_the_texts_of_one_field(fields: list[tuple[int, int | bytes]], wanted: int) -> None:
    fields = [(wanted, b"text"), *fields, (wanted, 7)]
    data = b"".join(write_field(n, v) if isinstance(v, bytes) else write_number(n, v) for n, v in fields)
    assert [bytes(view) for view in read_views(data, wanted)] == [
        value for number, value in fields if number == wanted and isinstance(value, bytes)
    ]
