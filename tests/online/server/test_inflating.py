"""Decompression in steps; ``http/test_compression.py`` has the steps themselves."""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.online.server.inflating import GZIP, ZLIB, Inflater, inflate, inflate_small
from penstock.online.server.offload import INLINE_BYTES, finish

LIMIT = 100_000
KINDS = [(31, gzip.compress), (15, zlib.compress)]
Compress = Callable[[bytes], bytes]


@given(st.integers(0, 3000), st.integers(1, 500), st.booleans())
def test_every_step_adds_what_it_may_and_no_more(size: int, most: int, is_random: bool) -> None:
    content = random.Random(size).randbytes(size) if is_random else bytes(size)
    inflater, before = Inflater(zlib.compress(content), 15, LIMIT), 0
    while not inflater.step(most):
        assert len(inflater.content) == before + most
        before += most
    assert len(inflater.content) - before <= most
    assert inflater.content == content
    assert inflater.content.readonly


@pytest.mark.parametrize(("bits", "compress"), KINDS)
def test_limits_and_faults(bits: int, compress: Compress) -> None:
    packed = compress(b"abc" * 1000)
    whole = Inflater(compress(bytes(LIMIT)), bits, LIMIT)
    assert whole.step()
    assert whole.content == bytes(LIMIT)
    with pytest.raises(ResourceExhausted, match="exceeds the limit of 100000 bytes"):
        Inflater(compress(bytes(LIMIT + 1)), bits, LIMIT).step()
    for data, message in ((packed[:-3], "is cut off"), (b"", "is cut off"), (b"nonsense", "is corrupt")):
        with pytest.raises(InvalidArgument, match=message):
            Inflater(data, bits, LIMIT).step()


def test_what_follows_the_first_member_is_not_read() -> None:
    inflater = Inflater(gzip.compress(b"one") + gzip.compress(b"two"), 31, LIMIT)
    assert inflater.step()
    assert inflater.content == b"one"


def test_a_bomb_is_not_blown_up_and_large_data_is_not_copied_with_every_step() -> None:
    for data in (zlib.compress(bytes(100_000_000)), zlib.compress(random.Random(1).randbytes(10_000_000))):
        inflater = Inflater(data, 15, LIMIT)
        tracemalloc.start()
        try:
            assert not inflater.step(1000)
            with pytest.raises(ResourceExhausted):
                inflater.step()
            assert tracemalloc.get_traced_memory()[1] < 10 * LIMIT
        finally:
            tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(0, 2 * INLINE_BYTES), st.sampled_from(KINDS))
def test_small_data_is_decompressed_at_once_and_equally(content: bytes, more: int, kind: tuple[int, Compress]) -> None:
    bits, compress = kind
    content += bytes(more)
    found = inflate_small(compress(content), bits)
    assert found == (content if len(content) < INLINE_BYTES else found)
    assert found in (content, None)
    assert finish(inflate(compress(content), bits, LIMIT)) == content


@pytest.mark.parametrize("bits", [GZIP, ZLIB])
def test_small_data_that_is_wrong_or_becomes_large_is_left_to_the_steps(bits: int) -> None:
    compress = dict(KINDS)[bits]
    packed = compress(b"abc")
    for data in (b"", b"nonsense", packed[:-1], packed + b"x", compress(bytes(INLINE_BYTES + 1))):
        assert inflate_small(data, bits) is None
