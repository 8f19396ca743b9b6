"""Bit streams that numpy decodes fast. A block of up to 65,536 symbols is split into lanes, which are decoded in lock-step.

Symbol ``i`` of a block is in lane ``i % lanes``. Each lane is a separate bit stream. One table look-up in numpy decodes a symbol of
every lane of many blocks, even if the blocks have different tables. This takes about 5 ns per symbol without compiled code. Threads do
not help, because such short calls mainly wait for the interpreter's lock.

A block starts with ``least`` (u16) and ``width`` (u8). Then come the lengths of the lanes in bits, each minus ``least`` and written
with ``width`` bits. The lanes follow, without gaps. Lengths and lanes are each padded to a byte with zeros. All numbers are
little-endian, lowest bit first. The last symbols of lanes that are too short are filled with the symbol of the shortest code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.bundle.coded.huffman import codes
from penstock.errors import IntegrityError
from penstock.tensor import Array

BLOCK = 1 << 16
"""Number of symbols in a full block."""
_STEPS = 512
"""Number of symbols in a full lane."""
_GROUP_LANES = 4096
"""Number of lanes decoded together; more lanes do not fit a core's cache."""
_HEAD = struct.Struct("<HB")
_LENGTH_BITS = 15
_LENGTH_MASK = 15


class Block(NamedTuple):
    """An encoded block: its bytes, its number of symbols (1 … ``BLOCK``), and its decoding table."""

    data: memoryview
    symbols: int
    table: Array

    @property
    def lanes(self) -> int:
        return -(-self.symbols // _STEPS)

    @property
    def steps(self) -> int:
        return -(-self.symbols // self.lanes)


def encode_block(symbols: Array, lengths: Array) -> bytes:
    """Encode 1 to BLOCK ``symbols`` with the canonical code for ``lengths``. Every symbol is below ``len(lengths)``."""
    lanes = -(-len(symbols) // _STEPS)
    steps = -(-len(symbols) // lanes)
    filled = np.full(steps * lanes, lengths.argmin())
    filled[: len(symbols)] = symbols
    by_lane = filled.reshape(steps, lanes).T.ravel()
    sizes = lengths.astype(np.int64)[by_lane]
    totals = sizes.reshape(lanes, steps).sum(axis=1)
    ends = sizes.cumsum()
    bits = np.zeros(int(ends[-1]), np.uint8)
    values = codes(lengths)[by_lane]
    for bit in range(int(lengths.max())):
        longer = sizes > bit
        bits[(ends - sizes)[longer] + bit] = (values[longer] >> bit) & 1
    least = int(totals.min())
    width = int(totals.max() - least).bit_length()
    extra = ((totals - least)[:, np.newaxis] >> np.arange(width)) & 1
    packed = [np.packbits(part.astype(np.uint8), bitorder="little").tobytes() for part in (extra.ravel(), bits)]
    return _HEAD.pack(least, width) + b"".join(packed)


def decode_blocks(blocks: Sequence[Block]) -> list[Array]:
    """Decode each block into its symbols (uint16). Raises IntegrityError for bytes that ``encode_block`` cannot have written."""
    found: list[Array] = [np.empty(0, np.uint16)] * len(blocks)
    # The lanes are in descending order of their numbers of steps, so that the unfinished lanes always come first.
    order = sorted(range(len(blocks)), key=lambda number: -blocks[number].steps)
    for group in _groups(order, blocks):
        symbols = _decode_group([blocks[number] for number in group])
        column = 0
        for number in group:
            block = blocks[number]
            own = symbols[: block.steps, column : column + block.lanes].reshape(-1)
            if (own[block.symbols :] != block.table[0] >> 4).any():
                raise _damaged()
            found[number] = own[: block.symbols]
            column += block.lanes
    return found


def _groups(order: Sequence[int], blocks: Sequence[Block]) -> Iterator[list[int]]:
    group: list[int] = []
    lanes = 0
    for number in order:
        if group and lanes + blocks[number].lanes > _GROUP_LANES:
            yield group
            group, lanes = [], 0
        group.append(number)
        lanes += blocks[number].lanes
    if group:
        yield group


def _decode_group(blocks: Sequence[Block]) -> Array:
    """The symbols, uint16 [steps, lanes]; rows after a block's last step have arbitrary values."""
    windows, starts, ends = _lay_out(blocks)
    table, width, bases = _join_tables(blocks)
    counts = [block.lanes for block in blocks]
    first_entry = np.repeat(np.array(bases), counts)
    active = np.repeat(np.array([block.steps for block in blocks]), counts)
    steps = int(active[0])
    entries = np.empty((steps, len(starts)), np.uint16)
    lanes_at = (active[np.newaxis, :] > np.arange(steps)[:, np.newaxis]).sum(axis=1) if active[-1] < steps else None
    positions = starts
    step = 0
    while step < steps:
        stop = _run_end(lanes_at, step, steps)
        lanes = len(starts) if lanes_at is None else int(lanes_at[step])
        _advance(windows, table, width, first_entry[:lanes], positions[:lanes], entries[step:stop, :lanes])
        step = stop
    if (positions != ends).any():
        raise _damaged()
    entries >>= 4
    return entries


def _run_end(lanes_at: Array | None, step: int, steps: int) -> int:
    """The first step after ``step`` in which fewer lanes have symbols."""
    if lanes_at is None:
        return steps
    return step + int((lanes_at[step:] == lanes_at[step]).sum())


def _advance(windows: Array, table: Array, width: int, first_entry: Array, positions: Array, entries: Array) -> None:
    """Decode ``len(entries)`` symbols of each lane into ``entries``, and advance ``positions`` (bits).

    A window of 64 bits starts at every 32nd bit. At most 31 of its bits are used, so it contains ``33 // width`` new symbols.
    """
    ahead = 33 // width
    index, window, entry = np.empty((3, len(positions)), np.int64)
    mask = (1 << width) - 1
    for step, row in enumerate(entries):
        if step % ahead == 0:
            np.right_shift(positions, 5, index)
            windows.take(index, 0, window, "clip")  # a lane that overran is detected by its end position and rejected
            np.bitwise_and(positions, 31, index)
            np.right_shift(window, index, window)  # the shift adds copies of the sign above the bits that are used
        np.bitwise_and(window, mask, index)
        np.add(index, first_entry, index)
        table.take(index, 0, entry, "clip")
        row[:] = entry
        np.bitwise_and(entry, _LENGTH_MASK, entry)
        np.right_shift(window, entry, window)
        np.add(positions, entry, positions)


def _lay_out(blocks: Sequence[Block]) -> tuple[Array, Array, Array]:
    """The 64-bit windows at every 32nd bit, int64, and the start and end of each lane, in bits."""
    starts, ends = [], []
    parts: list[bytes | memoryview] = []
    offset = 0
    for block in blocks:
        totals, bits = _lane_lengths(block)
        ends.append(totals.cumsum() + 8 * offset)
        starts.append(ends[-1] - totals)
        parts += [bits, bytes(-len(bits) % 4)]
        offset += len(bits) + -len(bits) % 4
    words = np.frombuffer(b"".join((*parts, bytes(8))), "<u4")
    windows = np.empty((len(words) - 1, 2), "<u4")
    windows[:, 0], windows[:, 1] = words[:-1], words[1:]
    return windows.view("<i8").reshape(-1), np.concatenate(starts), np.concatenate(ends)


def _lane_lengths(block: Block) -> tuple[Array, memoryview]:
    """The lengths of the lanes in bits, int64, and the bytes of the lanes. Checks that padding is zero."""
    if len(block.data) < _HEAD.size:
        raise _damaged()
    least, width = _HEAD.unpack_from(block.data)
    at = _HEAD.size + -(-width * block.lanes // 8)
    if width > _LENGTH_BITS or len(block.data) < at:
        raise _damaged()
    bits = np.unpackbits(np.frombuffer(block.data[_HEAD.size : at], np.uint8), bitorder="little")
    own, filling = bits[: width * block.lanes], bits[width * block.lanes :]
    totals = least + own.reshape(block.lanes, width).astype(np.int64) @ (1 << np.arange(width))
    total = int(totals.sum())
    lanes = block.data[at:]
    if filling.any() or len(lanes) != -(-total // 8) or (total % 8 and lanes[-1] >> total % 8):
        raise _damaged()
    return totals, lanes


def _join_tables(blocks: Sequence[Block]) -> tuple[Array, int, list[int]]:
    """The concatenated tables of all blocks, the number of bits that index each table, and the start of each block's table."""
    tables = {id(block.table): block.table for block in blocks}
    size = max(len(table) for table in tables.values())
    places = {key: size * number for number, key in enumerate(tables)}
    joined = np.concatenate([np.tile(table, size // len(table)) for table in tables.values()]).astype(np.int64)
    return joined, size.bit_length() - 1, [places[id(block.table)] for block in blocks]


def _damaged() -> IntegrityError:
    return IntegrityError("a block of the coded model does not decode")
