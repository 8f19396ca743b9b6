"""Encode one tensor: verbatim, deflated, Huffman-coded, or Huffman-coded without its zeros, whichever is smallest.

Tensors are treated as bit patterns (unsigned integers of the element's size), so that decoding restores every bit: ``-0.0`` is not
zero, and a NaN keeps its payload.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import log2
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from penstock.bundle.coded.gaps import MAX_BITS, to_gaps, to_positions
from penstock.bundle.coded.huffman import MAX_ALPHABET, MAX_LENGTH, code_lengths, decoding_table
from penstock.bundle.coded.lanes import BLOCK, Block, encode_block
from penstock.bundle.coded.payloads import ITEM_SIZES
from penstock.errors import IntegrityError
from penstock.tensor import Array

Codec = Literal["verbatim", "deflate", "huffman", "sparse"]
_GAP_BITS = (3, 4, 5, 6, 7, 8)
PATTERNS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SAMPLE = 1 << 17
"""Number of positions that are sampled to choose the gap size."""
_MIN_SPARSITY = 0.1
"""Gaps can save bytes only if at least this fraction of the elements is zero."""
_STREAM_BYTES = 12
"""Approximate overhead of a stream in bytes, in addition to its blocks and its table."""


class SymbolStream(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence of ``count`` symbols in blocks of ``sizes`` bytes. Every symbol of the alphabet occurs at least once."""

    count: int
    alphabet: bytes
    """The values of the symbols in ascending order, delta-coded with wrap-around. Floats are FP16 if ``half`` is True."""
    lengths: bytes
    """Code lengths, two per byte, the first in the lower half; empty if the alphabet has only one symbol."""
    sizes: list[int]


class CodedTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A coded tensor, as recorded in the header."""

    name: str
    dtype: str
    shape: list[int]
    graph_bytes: int
    """Number of bytes of the graph between the previous tensor and this one."""
    codec: Codec
    half: bool
    gap_bits: int
    streams: list[SymbolStream]


class Coded(NamedTuple):
    """A coded tensor: its streams, and their blocks in order."""

    codec: Codec
    streams: list[SymbolStream]
    blocks: list[bytes]
    half: bool = False
    """True if the values are stored as FP16. Decoding converts the values to FP32, the tensor's type."""
    gap_bits: int = 0

    @property
    def cost(self) -> int:
        tables = sum(len(stream.alphabet) + len(stream.lengths) + _STREAM_BYTES for stream in self.streams)
        return tables + sum(len(block) + 4 for block in self.blocks)


def encode_tensor(payload: memoryview, item_size: int, limit: int) -> Coded:
    """Encode ``payload``, which has elements of ``item_size`` bytes. Huffman codes have at most ``limit`` bits."""
    choices = [_stored("verbatim", bytes(payload))]
    alphabet, index, counts = _census(np.frombuffer(payload, PATTERNS[item_size]))
    if len(alphabet):
        small, half = _halved(alphabet)
        if alphabet[0] == 0 and len(alphabet) > 1 and counts[0] > _MIN_SPARSITY * len(index):
            choices.append(_sparse(index, small[1:], counts[1:], limit, half))
        choices.append(Coded("huffman", *_streams([_encode(index, small, counts, limit)]), half))
    best = min(choices, key=lambda coded: coded.cost)
    # Deflating at level 9 can take seconds per megabyte, so it is tried only if level 1 comes close to the best coding.
    if len(deflate(payload, level=1)) < 1.3 * best.cost:
        best = min(best, _stored("deflate", deflate(payload)), key=lambda one: one.cost * _reluctance(one.codec))
    return best


def _reluctance(codec: Codec) -> float:
    return 1.02 if codec == "deflate" else 1.0


def deflate(data: bytes | memoryview, level: int = 9) -> bytes:
    """Compress ``data`` to a raw deflate stream."""
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def inflate(data: bytes | memoryview, size: int) -> bytes:
    """Inflate a part of a coded model to ``size`` bytes. Memory use is limited to ``size``. Raises IntegrityError for invalid data."""
    unpacker = zlib.decompressobj(-15)
    try:
        found = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise IntegrityError(f"a part of the coded model does not inflate: {error}") from None
    if len(found) != size or not unpacker.eof or unpacker.unused_data:
        raise IntegrityError("a part of the coded model inflates to a different size than declared")
    return found


class Decoder:
    """Decodes one tensor in two steps, so that the blocks of many tensors can be decoded together."""

    def __init__(self, tensor: CodedTensor, data: Sequence[memoryview], size: int) -> None:
        """``data`` has the tensor's blocks; the tensor takes ``size`` bytes. Raises IntegrityError if ``tensor`` contradicts them."""
        self.tensor = tensor
        self.size = size
        self._data = data
        self._pattern = PATTERNS[ITEM_SIZES[tensor.dtype]]
        self._alphabets: list[Array] = []
        self.blocks: list[Block] = []
        _require(len(tensor.streams) == (2 if tensor.codec == "sparse" else 1))
        if tensor.codec in ("verbatim", "deflate"):
            _require(len(data) == 1 and tensor.streams[0].count == 0)
            return
        self._count = size // self._pattern.itemsize
        _require(size % self._pattern.itemsize == 0)
        value, *gaps = tensor.streams
        if tensor.codec == "sparse":
            _require(1 <= tensor.gap_bits <= MAX_BITS and value.count <= gaps[0].count <= self._count)
        else:
            _require(value.count == self._count)
        first = np.dtype("<u2") if tensor.half else self._pattern
        for stream, kind in zip(tensor.streams, (first, np.dtype("<u2")), strict=False):
            self._add_stream(stream, kind)

    def _add_stream(self, stream: SymbolStream, kind: np.dtype[Any]) -> None:
        alphabet = _read_alphabet(stream.alphabet, kind)
        self._alphabets.append(alphabet)
        _require(1 <= len(alphabet) <= MAX_ALPHABET and stream.count > 0)
        counts = [] if len(alphabet) == 1 else _block_counts(stream.count)
        _require(len(stream.sizes) == len(counts))
        start = len(self.blocks)
        own = self._data[start : start + len(counts)]
        if counts:
            table = decoding_table(_read_lengths(stream.lengths, len(alphabet)))
            # Every symbol takes at least a bit, so the input's size bounds the declared output.
            _require(all(count <= 8 * len(data) for count, data in zip(counts, own, strict=True)))
            self.blocks += [Block(data, count, table) for data, count in zip(own, counts, strict=True)]
        else:
            _require(not stream.lengths)

    def symbols(self, decoded: Sequence[Array]) -> list[Array]:
        """The symbols of each stream; ``decoded`` has the symbols of each block."""
        return self._spelt([np.arange(MAX_ALPHABET, dtype=np.uint16)] * len(self._alphabets), decoded)

    def _spelt(self, alphabets: Sequence[Array], decoded: Sequence[Array]) -> list[Array]:
        """For each stream, the values of its symbols according to its alphabet. Works block by block to save memory, because numpy
        converts indices to 8 bytes.
        """
        found, blocks = [], iter(decoded)
        for stream, alphabet in zip(self.tensor.streams, alphabets, strict=True):
            values = np.full(stream.count, alphabet[0])
            for at in range(0, stream.count if stream.sizes else 0, BLOCK):
                alphabet.take(next(blocks), 0, values[at : at + BLOCK], "clip")  # no symbol is out of range
            found.append(values)
        return found

    def finish(self, decoded: Sequence[Array]) -> bytes | memoryview:
        """The tensor's bytes; ``decoded`` has the symbols of each block. Raises IntegrityError."""
        if self.tensor.codec == "verbatim":
            _require(len(self._data[0]) == self.size)
            return self._data[0]
        if self.tensor.codec == "deflate":
            return inflate(self._data[0], self.size)
        alphabet, *others = self._alphabets
        if self.tensor.half:
            _require(self._pattern.itemsize == 4)
            alphabet = alphabet.view("<f2").astype("<f4").view(self._pattern)
        values, *gaps_found = self._spelt([alphabet, *others], decoded)
        if self.tensor.codec == "sparse":
            (gaps,) = gaps_found
            _require(int(gaps.max()) < 1 << self.tensor.gap_bits)
            positions = to_positions(gaps, self.tensor.gap_bits, len(values), self._count)
            dense = np.zeros(self._count, self._pattern)
            dense[positions] = values
            values = dense
        return values.data.cast("B")


def entropy_bytes(symbols: Array) -> float:
    """The entropy of ``symbols`` in bytes: the minimum size with any code that encodes symbols one by one (Shannon)."""
    counts = np.bincount(symbols)
    share = counts[counts > 0] / max(1, len(symbols))
    return float(-(share * np.log2(share)).sum() * len(symbols) / 8)


def _stored(codec: Codec, data: bytes) -> Coded:
    return Coded(codec, [SymbolStream(0, b"", b"", [len(data)])], [data])


def _census(patterns: Array) -> tuple[Array, Array, Array]:
    """The distinct patterns in ascending order, the index of each element's pattern, and the count of each pattern. All are empty if
    there are too many patterns.
    """
    few = len(np.unique(patterns[: 4 * MAX_ALPHABET])) <= MAX_ALPHABET
    alphabet = np.unique(patterns) if few else patterns[:0]
    if len(alphabet) > MAX_ALPHABET:
        alphabet = alphabet[:0]
    index = np.searchsorted(alphabet, patterns) if len(alphabet) else np.zeros(0, np.int64)
    return alphabet, index, np.bincount(index, minlength=len(alphabet))


def _halved(alphabet: Array) -> tuple[Array, bool]:
    """FP16 patterns and True if the conversion changes no value; otherwise the FP32 patterns and False."""
    if alphabet.itemsize != 4:
        return alphabet, False
    with np.errstate(all="ignore"):
        halves = alphabet.view("<f4").astype("<f2")
        exact = (halves.astype("<f4").view("<u4") == alphabet).all()
    halves = halves.view("<u2")
    return (halves, True) if exact and (halves[1:] > halves[:-1]).all() else (alphabet, False)


def _encode(index: Array, alphabet: Array, counts: Array, limit: int) -> tuple[SymbolStream, list[bytes]]:
    """The stream of ``alphabet[index]`` and its blocks."""
    differences = np.diff(alphabet, prepend=alphabet[:1] * 0).tobytes()
    if len(alphabet) == 1:
        return SymbolStream(len(index), differences, b"", []), []
    enough = min(MAX_LENGTH, max(limit, int(log2(len(alphabet))) + 2))
    lengths = code_lengths(counts, enough)
    blocks = [encode_block(index[at : at + BLOCK], lengths) for at in range(0, len(index), BLOCK)]
    return SymbolStream(len(index), differences, _pack_nibbles(lengths), [len(block) for block in blocks]), blocks


def _streams(encoded: Sequence[tuple[SymbolStream, list[bytes]]]) -> tuple[list[SymbolStream], list[bytes]]:
    return [stream for stream, _ in encoded], [block for _, blocks in encoded for block in blocks]


def _sparse(index: Array, alphabet: Array, counts: Array, limit: int, half: bool) -> Coded:
    """The elements other than zero, with their positions as gaps. Zero is symbol 0 of ``index``."""
    positions = np.flatnonzero(index)
    bits = min(_GAP_BITS, key=lambda bits: _gap_cost(positions[:_SAMPLE], bits))
    used, gaps, gap_counts = np.unique(to_gaps(positions, bits), return_inverse=True, return_counts=True)
    value = _encode(index[positions] - 1, alphabet, counts, limit)
    return Coded(
        "sparse", *_streams([value, _encode(gaps, used.astype("<u2"), gap_counts, limit)]), half=half, gap_bits=bits
    )


def _gap_cost(positions: Array, bits: int) -> float:
    return entropy_bytes(to_gaps(positions, bits)) + (1 << bits) / 2


def _pack_nibbles(lengths: Array) -> bytes:
    even = np.append(lengths, np.zeros(len(lengths) % 2, np.uint8))
    return bytes(even[0::2] | even[1::2] << 4)


def _read_lengths(data: bytes, count: int) -> Array:
    _require(len(data) == -(-count // 2))
    packed = np.frombuffer(data, np.uint8)
    lengths = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    _require(not lengths[count:].any())
    return np.asarray(lengths[:count])


def _read_alphabet(data: bytes, kind: np.dtype[Any]) -> Array:
    _require(len(data) % kind.itemsize == 0)
    alphabet = np.frombuffer(data, kind).cumsum(dtype=kind)
    _require(bool((alphabet[1:] > alphabet[:-1]).all()))
    return np.asarray(alphabet)


def _block_counts(count: int) -> list[int]:
    return [min(BLOCK, count - at) for at in range(0, count, BLOCK)]


def _require(fits: bool) -> None:
    if not fits:
        raise IntegrityError("a tensor of the coded model is inconsistent with its description")
