from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.coded.huffman import MAX_LENGTH, code_lengths, codes, decoding_table
from penstock.errors import IntegrityError

_COUNTS = st.lists(st.integers(1, 10**6), min_size=2, max_size=60)


def _huffman_bits(counts: list[int]) -> int:
    """The size of Huffman's own code without a limit: the sum of all merged weights."""
    heap = list(counts)
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


def _least_bits(counts: list[int], limit: int) -> int:
    """The minimum over every complete code of lengths up to ``limit``; rarer symbols get longer codes."""
    counts = sorted(counts, reverse=True)
    best = 1 << 60

    def search(index: int, least: int, room: int, bits: int) -> None:
        nonlocal best
        if index == len(counts):
            best = min(best, bits)
            return
        for length in range(least, limit + 1):
            left = room - (1 << (limit - length))
            if left >= len(counts) - index - 1:
                search(index + 1, length, left, bits + counts[index] * length)

    search(0, 1, 1 << limit, 0)
    return best


@given(_COUNTS)
def test_without_a_limit_that_matters_it_is_huffmans(counts: list[int]) -> None:
    if _huffman_depth(counts) <= MAX_LENGTH:
        lengths = code_lengths(np.array(counts), MAX_LENGTH)
        assert int(lengths @ np.array(counts)) == _huffman_bits(counts)


def _huffman_depth(counts: list[int]) -> int:
    heap = [(count, 0, number) for number, count in enumerate(counts)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (a, da, _), (b, db, _) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (a + b, max(da, db) + 1, number))
        number += 1
    return heap[0][1]


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=7), st.integers(3, 5))
def test_with_a_limit_no_code_is_shorter(counts: list[int], limit: int) -> None:
    lengths = code_lengths(np.array(counts), limit)
    assert lengths.max() <= limit
    assert int(lengths @ np.array(counts)) == _least_bits(counts, limit)


@given(_COUNTS, st.integers(6, MAX_LENGTH))
def test_the_table_reads_every_code(counts: list[int], limit: int) -> None:
    lengths = code_lengths(np.array(counts), limit)
    table = decoding_table(lengths)
    for symbol, (code, length) in enumerate(zip(codes(lengths), lengths, strict=True)):
        for rest in (0, (len(table) >> int(length)) - 1):
            entry = int(table[int(code) | rest << int(length)])
            assert (entry >> 4, entry & 15) == (symbol, length)


def test_fibonacci_counts_are_cut_at_the_limit() -> None:
    counts = [1, 1]
    while len(counts) < 40:
        counts.append(counts[-1] + counts[-2])
    for limit in (6, 8, 12, 15):
        lengths = code_lengths(np.array(counts), limit).astype(int)
        assert lengths.max() == limit
        assert sum(2.0**-lengths) == 1


def test_small_alphabets() -> None:
    assert code_lengths(np.array([], int), 12).tolist() == []
    assert code_lengths(np.array([7]), 12).tolist() == [0]
    assert code_lengths(np.array([7, 1]), 12).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 1, 1], "over-subscribed"),
        ([1, 2, 2, 15], "over-subscribed"),
        ([2, 2, 2], "incomplete"),
        ([1, 2], "incomplete"),
        ([1, 0, 1], "invalid code lengths"),
        ([1, 16], "invalid code lengths"),
        ([1], "invalid code lengths"),
        ([], "invalid code lengths"),
        ([13] * 8192, "invalid code lengths"),
    ],
)
def test_lengths_that_are_no_code_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        decoding_table(np.array(lengths, np.uint8)) if lengths else decoding_table(np.ones(0, np.uint8))
