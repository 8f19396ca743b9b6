import gzip
import zlib
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from announced_steps import announced
from penstock.errors import InvalidArgument
from penstock.online.server.http.compression import compress, inflate, knows, preferred, weights
from penstock.online.server.inflating import TooLarge
from penstock.online.server.to_thread import STEP_BYTES, finish

ENCODINGS = [b"gzip", b"deflate"]


def decompress(body: bytes, encoding: bytes, limit: int) -> memoryview:
    return finish(inflate(body, encoding, limit))


@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from(ENCODINGS))
def test_what_was_compressed_comes_out_again(parts: list[bytes], encoding: bytes) -> None:
    assert decompress(finish(compress(parts, encoding)), encoding, 10_000) == b"".join(parts)


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_what_others_compress(size: int) -> None:
    body = bytes(size)
    assert decompress(gzip.compress(body, mtime=0), b"gzip", size) == body
    assert decompress(zlib.compress(body), b"deflate", size) == body


def test_incompressible_bodies_of_many_slices() -> None:
    body = b"".join(zlib.crc32(bytes([n & 255, n >> 8])).to_bytes(4, "big") for n in range(60_000))
    assert decompress(zlib.compress(body, 0), b"deflate", len(body)) == body


def test_it_goes_in_steps_that_are_announced() -> None:
    body = bytes(5_000_000)
    for steps, expected, beside in (
        (inflate(gzip.compress(body), b"gzip", len(body)), body, 0),
        (compress([body, bytes(7)], b"gzip"), None, 272 << 10),
    ):
        sizes, found = announced(steps)
        assert len(sizes) >= len(body) // STEP_BYTES
        assert all(0 <= after - before <= STEP_BYTES for before, after in pairwise([beside, *sizes]))
        assert len(found) <= sizes[-1]
        assert found == expected or gzip.decompress(found) == body + bytes(7)


@given(st.lists(st.integers(0, 100_000), max_size=12))
def test_small_content_is_compressed_in_one_step_that_holds_no_more_than_it(lengths: list[int]) -> None:
    assume(sum(lengths) <= STEP_BYTES)
    sizes, found = announced(compress([bytes(length) for length in lengths], b"gzip"))
    assert sizes == [sum(lengths)]
    assert gzip.decompress(found) == bytes(sum(lengths))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_bomb_is_refused_before_it_is_big(encoding: bytes) -> None:
    bomb = finish(compress([bytes(200_000_000)], encoding))
    assert len(bomb) < 2_000_000
    with pytest.raises(TooLarge, match="larger than 1000 bytes"):
        decompress(bomb, encoding, 1000)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "truncated"),
        (b"nonsense", "is corrupt"),
        (gzip.compress(b"abc", mtime=0)[:-1], "truncated"),
        (gzip.compress(b"abc", mtime=0) + b"x", "followed by 1 bytes"),
        (gzip.compress(b"abc", mtime=0) * 2, "followed by"),
        (gzip.compress(b"abc", mtime=0)[:-5] + b"12345", "is corrupt"),
    ],
)
def test_bodies_that_are_wrong(body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decompress(body, b"gzip", 1000)


@given(st.binary(max_size=200), st.sampled_from(ENCODINGS))
def test_any_bytes_are_read_or_refused(body: bytes, encoding: bytes) -> None:
    with suppress(InvalidArgument, TooLarge):
        decompress(body, encoding, 1000)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"", b""),
        (b"gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"GZIP, Deflate", b"gzip"),
        (b"gzip;q=0.5, deflate;q=0.8", b"deflate"),
        (b"gzip;q=0", b""),
        (b"gzip;q=0.000, *", b"deflate"),
        (b"*", b"gzip"),
        (b"*;q=0", b""),
        (b"br", b""),
        (b"identity", b""),
        (b"identity, gzip;q=0.5", b""),
        (b"gzip; q=0.5", b"gzip"),
        (b"gzip;q=nan", b""),
        (b"gzip;q=2", b""),
        (b"gzip;level=9", b""),
        (b",;,=;", b""),
    ],
)
def test_the_encoding_that_a_client_likes_best(accept: bytes, expected: bytes) -> None:
    assert preferred(accept) == expected


def test_weights_of_what_a_client_accepts() -> None:
    assert weights(b"A, b;q=0.5 ,c;q=x") == {b"a": 1.0, b"b": 0.5, b"c": 0.0}


@given(st.binary(max_size=50))
def test_any_wish_is_understood(accept: bytes) -> None:
    assert preferred(accept) in (b"", *ENCODINGS)


def test_encodings_known() -> None:
    assert knows(b"gzip")
    assert not knows(b"br")
