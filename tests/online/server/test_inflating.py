"""Decompression in steps; ``http/test_compression.py`` has the steps themselves."""

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.server.inflating import GZIP, ZLIB, inflate, inflate_small
from penstock.online.server.to_thread import INLINE_BYTES, finish

LIMIT = 100_000
KINDS = [(31, gzip.compress), (15, zlib.compress)]
Compress = Callable[[bytes], bytes]


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
