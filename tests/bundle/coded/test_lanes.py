from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bundle.coded.huffman import code_lengths, codes, decoding_table
from penstock.bundle.coded.lanes import BLOCK, Block, decode_blocks, encode_block
from penstock.errors import IntegrityError
from penstock.tensor import Array

_SIZES = st.sampled_from([1, 2, 3, 511, 512, 513, 1024, 1025, 5000])


def _coded(count: int, symbols: int, seed: int) -> tuple[Array, Array, Block]:
    rng = np.random.default_rng(seed)
    drawn = np.minimum(rng.geometric(0.2, count) - 1, symbols - 1)
    lengths = code_lengths(np.bincount(drawn, minlength=symbols) + 1, 12)
    return drawn, lengths, Block(memoryview(encode_block(drawn, lengths)), count, decoding_table(lengths))


def _by_hand(block: Block, lengths: Array) -> list[int]:
    """Decode bit by bit, according to the description of the format."""
    least, width = struct.unpack_from("<HB", block.data)
    bits = np.unpackbits(np.frombuffer(block.data, np.uint8)[3:], bitorder="little")
    sizes = [least + sum(int(bits[lane * width + i]) << i for i in range(width)) for lane in range(block.lanes)]
    bits = bits[-(-width * block.lanes // 8) * 8 :]
    meanings = {
        (int(code), int(size)): symbol for symbol, (code, size) in enumerate(zip(codes(lengths), lengths, strict=True))
    }
    found = np.zeros((block.steps, block.lanes), int)
    at = 0
    for lane, size in enumerate(sizes):
        end = at + size
        for step in range(block.steps):
            code = length = 0
            while (code, length) not in meanings:
                code |= int(bits[at]) << length
                length += 1
                at += 1
            found[step, lane] = meanings[code, length]
        assert at == end
    return found.reshape(-1)[: block.symbols].tolist()


@given(st.lists(st.tuples(_SIZES, st.integers(2, 300), st.integers(0, 9)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_blocks_of_any_size_and_code_are_decoded_together(kinds: list[tuple[int, int, int]]) -> None:
    made = [_coded(*kind) for kind in kinds]
    for (drawn, _, _), found in zip(made, decode_blocks([block for *_, block in made]), strict=True):
        assert np.array_equal(drawn, found)


@pytest.mark.parametrize("count", [1, 100, 700, 1500])
def test_a_plain_decoder_reads_the_same(count: int) -> None:
    drawn, lengths, block = _coded(count, 20, 3)
    assert _by_hand(block, lengths) == drawn.tolist()


def test_more_blocks_than_a_group() -> None:
    drawn, _, block = _coded(BLOCK, 7, 0)
    small = _coded(600, 200, 1)
    found = decode_blocks([small[2], *[block] * 40, small[2]])
    assert all(np.array_equal(drawn, one) for one in found[1:-1])
    assert np.array_equal(found[0], small[0])
    assert np.array_equal(found[-1], small[0])


@given(st.binary(max_size=300), st.integers(1, 2000))
@settings(deadline=None)
def test_what_is_no_block_is_refused_or_is_one(data: bytes, count: int) -> None:
    lengths = np.array([2, 2, 2, 2], np.uint8)
    block = Block(memoryview(data), count, decoding_table(lengths))
    try:
        found = decode_blocks([block])[0]
    except IntegrityError:
        return
    assert len(found) == count
    assert encode_block(found, lengths) == data  # there is one way to write it


def test_every_changed_bit_is_seen_or_changes_symbols() -> None:
    drawn, _, block = _coded(600, 9, 5)
    for bit in [*range(80), *range(80, 8 * len(block.data), 7)]:
        changed = bytearray(block.data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = decode_blocks([block._replace(data=memoryview(changed))])[0]
        except IntegrityError:
            continue
        assert not np.array_equal(found, drawn)
