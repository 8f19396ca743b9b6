"""Canonical, length-limited Huffman codes. Only the code lengths are stored.

Lengths come from package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes", 1990). Codes
are numbered by (length, symbol) and written lowest bit first, as in deflate (RFC 1951), so that a decoder can look up the next bits
in one table.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import IntegrityError
from penstock.tensor import Array

MAX_LENGTH = 15
MAX_ALPHABET = 4096
"""An entry of the decoding table has 16 bits: 12 for the symbol, 4 for the length."""


def code_lengths(counts: Array, limit: int) -> Array:
    """The code lengths (uint8) of an optimal code without lengths above ``limit``. ``counts`` (> 0) are the symbols' frequencies.

    A single symbol needs no bits: its length is 0. ``2 ** limit`` must be at least the number of symbols.
    """
    size = len(counts)
    assert size <= 1 << limit <= 1 << MAX_LENGTH
    if size < 2:
        return np.zeros(size, np.uint8)
    order = np.argsort(counts, kind="stable")
    leaves = np.asarray(counts, np.int64)[order]
    levels: list[
        Array
    ] = []  # for each level, the deepest first: True for each item, by ascending weight, that is a leaf
    items = leaves
    for _ in range(limit):
        packages = items[: len(items) & ~1].reshape(-1, 2).sum(axis=1) if levels else items[:0]
        weights = np.concatenate([leaves, packages])
        rank = np.argsort(weights, kind="stable")
        items = weights[rank]
        levels.append(rank < size)
    lengths = np.zeros(size, np.uint8)
    taken = 2 * size - 2
    for is_leaf in reversed(levels):
        leaves_taken = int(is_leaf[:taken].sum())
        lengths[:leaves_taken] += 1  # the leaves of least weight come first on every level
        taken = 2 * (taken - leaves_taken)
    return lengths[np.argsort(order)]


def codes(lengths: Array) -> Array:
    """The code of each symbol, uint16. ``lengths`` must be the lengths of a complete code. The lowest bit of a code is its first."""
    order = np.argsort(lengths, kind="stable")
    spans = 1 << (MAX_LENGTH - lengths[order].astype(np.int64))
    found = np.empty(len(lengths), np.uint16)
    found[order] = _reversed_bits(np.cumsum(spans) - spans, MAX_LENGTH)
    return found


def decoding_table(lengths: Array) -> Array:
    """A table of ``symbol << 4 | length`` (uint16), indexed by the next bits of the stream. The table's size is a power of two.

    ``lengths`` (uint8) must have at least two symbols. Raises IntegrityError if the lengths are incomplete (a bit pattern has no
    symbol) or over-subscribed (a bit pattern has several symbols).
    """
    if not 2 <= len(lengths) <= MAX_ALPHABET or lengths.min() < 1 or lengths.max() > MAX_LENGTH:
        raise IntegrityError("a Huffman table of the coded model has invalid code lengths")
    width = int(lengths.max())
    order = np.argsort(lengths, kind="stable")
    spans = 1 << (width - lengths[order].astype(np.int64))
    if (total := int(spans.sum())) != 1 << width:
        kind = "over-subscribed" if total > 1 << width else "incomplete"
        raise IntegrityError(f"a Huffman code of the coded model is {kind}")
    entries = (order.astype(np.uint16) << 4) | lengths[order]
    return np.asarray(np.repeat(entries, spans)[_reversed_bits(np.arange(1 << width), width)])


def _reversed_bits(values: Array, width: int) -> Array:
    reversed_values = np.zeros_like(values)
    for bit in range(width):
        reversed_values |= ((values >> bit) & 1) << (width - 1 - bit)
    return reversed_values
