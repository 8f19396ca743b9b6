"""The sizes of a coded model's parts."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np

from penstock.bundle.coded.container import HEAD, MAX_BYTES, parse
from penstock.bundle.coded.lanes import decode_blocks
from penstock.bundle.coded.payloads import ITEM_SIZES
from penstock.bundle.coded.tensors import PATTERNS, Codec, Decoder, entropy_bytes


class TensorSummary(msgspec.Struct, frozen=True):
    """The sizes of one coded tensor's parts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    dense_bytes: int
    code_bytes: int
    """Bytes of the coded values and their CRCs; without Huffman codes, bytes of the stored data and its CRC."""
    gap_bytes: int
    table_bytes: int
    """Bytes of codebook and code lengths, before the header is deflated."""
    values: int
    """Number of stored elements: all elements or, if zeros are left out, the nonzero elements."""
    zeros: int
    """Number of elements that are zero."""
    symbols: int
    """Number of distinct values among the stored elements."""
    gap_bits: int
    entropy_bytes: float
    """Entropy of values and gaps, in bytes: the minimum size with any code that encodes symbols one by one."""

    @property
    def sparsity(self) -> float:
        """Fraction of elements that are zero."""
        return self.zeros / max(1, prod(self.shape))


class Summary(msgspec.Struct, frozen=True):
    """The sizes of a coded model's parts."""

    model_bytes: int
    coded_bytes: int
    header_bytes: int
    """The deflated header: graph, small tensors, codebooks, code lengths, offsets."""
    graph_bytes: int
    """Bytes of graph and small tensors before deflating."""
    tensors: tuple[TensorSummary, ...]

    @property
    def ratio(self) -> float:
        """Size of the original divided by the size of the whole coded model."""
        return self.model_bytes / self.coded_bytes


def describe(data: bytes, max_bytes: int = MAX_BYTES) -> Summary:
    """Summarise a coded model. Raises the same errors as ``decode``, but does not check digests."""
    description, graph, decoders = parse(data, max_bytes)
    tensors = tuple(map(_summarize, decoders))
    header_bytes = HEAD.unpack_from(data)[2] + HEAD.size
    return Summary(description.model_bytes, len(data), header_bytes, len(graph), tensors)


def _summarize(decoder: Decoder) -> TensorSummary:
    tensor = decoder.tensor
    decoded = decode_blocks(decoder.blocks)
    symbols = decoder.symbols(decoded) if tensor.streams[0].count else []
    elements = np.frombuffer(decoder.finish(decoded), PATTERNS[ITEM_SIZES[tensor.dtype]])
    code_bytes, gap_bytes, *_ = (*(sum(stream.sizes) + 4 * len(stream.sizes) for stream in tensor.streams), 0)
    entropy = sum(map(entropy_bytes, symbols)) if symbols else float(code_bytes)
    return TensorSummary(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        codec=tensor.codec,
        dense_bytes=decoder.size,
        code_bytes=code_bytes,
        gap_bytes=gap_bytes,
        table_bytes=sum(len(stream.alphabet) + len(stream.lengths) for stream in tensor.streams),
        values=tensor.streams[0].count if symbols else prod(tensor.shape),
        zeros=len(elements) - int(np.count_nonzero(elements)),
        symbols=int(symbols[0].max()) + 1 if symbols else 0,
        gap_bits=tensor.gap_bits,
        entropy_bytes=entropy,
    )
