"""Messages that arrive in pieces, compressed messages, and size limits that apply before a message is complete."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.server.h2.grpc_messages import PREFIX, MessageReader, window_bits
from penstock.online.server.inflating import inflate
from penstock.online.server.to_thread import finish
from penstock.tensor import Buffer

LIMIT = 100_000


def framed(data: bytes, flag: int = 0) -> bytes:
    return PREFIX.pack(flag, len(data)) + data


def read(reader: MessageReader) -> list[tuple[int, bytes]]:
    found = []
    while (each := reader.next()) is not None:
        found.append((each[0], bytes(each[1])))
    return found


MESSAGES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=10)


@given(MESSAGES, st.lists(st.tuples(st.integers(0, 500), st.booleans(), st.booleans())))
def test_any_pieces(messages: list[tuple[int, bytes]], cuts: list[tuple[int, bool, bool]]) -> None:
    """Messages may be split at any byte. Pieces may be views, and the caller need not fetch messages after each piece."""
    whole = b"".join(framed(data, flag) for flag, data in messages)
    reader, found, start = MessageReader(LIMIT), [], 0
    for stop, is_view, asks in [*sorted(cuts), (len(whole), False, True)]:
        piece: Buffer = whole[start:stop]
        reader.feed(memoryview(piece) if is_view else piece)
        start = max(start, min(stop, len(whole)))
        if asks:
            found += read(reader)
    assert found == messages
    assert reader.is_between


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, LIMIT])
def test_large_ones_whole_and_cut(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    reader = MessageReader(LIMIT)
    reader.feed(framed(data) * 2)
    assert read(reader) == [(0, data)] * 2
    for start in range(0, size + 5, 9000):
        reader.feed(memoryview(framed(data))[start : start + 9000])
        messages = read(reader)
    assert messages == [(0, data)]


def test_what_is_received_of_a_message_is_not_between() -> None:
    reader = MessageReader(LIMIT)
    for byte in framed(b"ab")[:-1]:
        reader.feed(bytes((byte,)))
        assert reader.next() is None
        assert not reader.is_between


def test_a_length_is_checked_before_anything_is_kept() -> None:
    reader = MessageReader(LIMIT)
    reader.feed(PREFIX.pack(0, LIMIT + 1))
    with pytest.raises(ResourceExhausted, match="100001 bytes exceeds the limit of 100000"):
        reader.next()


def test_small_pieces_take_no_more_memory_than_the_message() -> None:
    reader = MessageReader(10_000_000)
    tracemalloc.start()
    try:
        reader.feed(PREFIX.pack(0, 10_000_000))
        for _ in range(20_000):
            reader.feed(b"x")
            assert reader.next() is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("flag", "encoding"), [(1, b""), (1, b"identity"), (2, b"gzip")])
def test_compressed_without_an_agreement(flag: int, encoding: bytes) -> None:
    with pytest.raises(PenstockError, match="no grpc-encoding"):
        window_bits(flag, encoding)


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compression(encoding: bytes, compress: Callable[[bytes], bytes]) -> None:
    steps = inflate(compress(b"abc" * 1000), window_bits(1, encoding), LIMIT)
    assert finish(steps) == b"abc" * 1000
