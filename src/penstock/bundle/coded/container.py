"""The container of a coded model: encodes an ONNX file in few bytes, and decodes it bit for bit.

The file, all numbers little-endian::

    magic "PSTC", version u8, then sizes u32 of the packed header, of the header, and of its description; CRC-32 of the packed header
    header, raw deflate: the description (msgpack, ``Description``), then the ONNX file without what is cut out of it
    blocks: of each tensor in the order of the file, each a CRC-32 and the block; see ``tensors`` and ``lanes``

A model is cut at the raw data of its initialisers and put together again, so nothing of ONNX is parsed to decode it. The
description holds the SHA-256 of the whole; a file that decodes to anything else is refused.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from math import prod

import msgspec

from penstock.bundle.coded.lanes import decode_blocks
from penstock.bundle.coded.payloads import ITEM_SIZES, find_payloads
from penstock.bundle.coded.tensors import CodedTensor, Decoder, deflate, encode_tensor, inflate
from penstock.errors import IntegrityError, InvalidArgument, InvalidModel, ResourceExhausted, Unsupported
from penstock.resources import usable_memory

MAX_BYTES = 2 << 30
"""ONNX files end here."""
MAGIC, _VERSION = b"PSTC", 1
HEAD = struct.Struct("<4sBIIII")
_CRC = struct.Struct("<I")
_BATCH_SYMBOLS = 1 << 21
"""Decoded together: enough lanes to be fast, and a few MiB of symbols."""
_MAX_DESCRIPTION_BYTES = 16 << 20
_SMALL_DESCRIPTION_BYTES = 64 << 10
"""A description may take this much however small the model is."""
_SMALL_BYTES = 4096
"""Below this, what Huffman codes do not shrink stays in the header, which is deflated as a whole."""


class CodingOptions(msgspec.Struct, frozen=True):
    """How to encode."""

    max_code_bits: int = 11
    """Longest Huffman code, 8 to 15 bits; an alphabet too large for it gets what it needs. Longer ones decode more slowly."""
    min_tensor_bytes: int = 64
    """Smaller tensors stay in the graph."""


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the header says of the model."""

    model_bytes: int
    sha256: bytes
    tensors: list[CodedTensor]


def encode(model: bytes, options: CodingOptions | None = None) -> bytes:
    """The ONNX file ``model`` as a coded model; ``decode`` gives the same bytes again.

    Raises InvalidModel if ``model`` is no ONNX file, InvalidArgument for options out of range, Unsupported above ``MAX_BYTES``.
    """
    options = options or CodingOptions()
    if not 8 <= options.max_code_bits <= 15 or options.min_tensor_bytes < 0:
        raise InvalidArgument(f"{options} cannot be", "give 8 to 15 bits a code, and no negative size")
    if len(model) > MAX_BYTES:
        raise Unsupported(f"the model takes {len(model) >> 20} MiB, and ONNX files end at 2 GiB")
    try:
        payloads = find_payloads(model)
    except ValueError as error:
        raise InvalidModel(f"this is not an ONNX file: {error}", "give an ONNX model") from None
    tensors, graph, at = [], [], 0
    blocks: list[bytes] = []
    for payload in payloads:
        data = memoryview(model)[payload.start : payload.stop]
        coded = encode_tensor(data, ITEM_SIZES[payload.dtype], options.max_code_bits)
        stored = coded.codec in ("verbatim", "deflate") and len(data) < _SMALL_BYTES
        if stored or len(data) < options.min_tensor_bytes:
            continue
        place = (payload.name, payload.dtype, list(payload.shape), payload.start - at)
        tensors.append(CodedTensor(*place, coded.codec, coded.half, coded.gap_bits, coded.streams))
        blocks += [part for block in coded.blocks for part in (_CRC.pack(zlib.crc32(block)), block)]
        graph.append(model[at : payload.start])
        at = payload.stop
    graph.append(model[at:])
    description = msgspec.msgpack.encode(Description(len(model), hashlib.sha256(model).digest(), tensors))
    if len(description) > min(_MAX_DESCRIPTION_BYTES, len(model) + _SMALL_DESCRIPTION_BYTES):
        raise Unsupported("the codebooks of the model take more than can be described", "share its weights first")
    header = b"".join((description, *graph))
    packed = deflate(header)
    head = HEAD.pack(MAGIC, _VERSION, len(packed), len(header), len(description), zlib.crc32(packed))
    return b"".join((head, packed, *blocks))


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """The model file that ``encode`` was given.

    Raises IntegrityError for anything that is not exactly what was encoded, or takes more than ``max_bytes`` decoded, and
    ResourceExhausted if there is not that much memory, both known before it is taken; Unsupported if a newer Penstock wrote it.
    """
    description, graph, decoders = parse(data, max_bytes)
    # A model of zeros takes a few bytes coded, so that nothing but its size says what it needs: its tensors, and these as a file.
    if 2 * description.model_bytes > (usable := usable_memory()) > 0:
        raise ResourceExhausted(
            f"the coded model takes {description.model_bytes >> 20} MiB decoded, twice that meanwhile, "
            f"and there are {usable >> 20} MiB of memory",
            "open it on a machine with more",
        )
    pieces: list[bytes | memoryview] = []
    at = 0
    for batch in _batches(decoders):
        symbols = iter(decode_blocks([block for decoder in batch for block in decoder.blocks]))
        for decoder in batch:
            own = list(islice(symbols, len(decoder.blocks)))
            pieces += [graph[at : at + decoder.tensor.graph_bytes], decoder.finish(own)]
            at += decoder.tensor.graph_bytes
    model = b"".join((*pieces, graph[at:]))
    if hashlib.sha256(model).digest() != description.sha256:
        raise IntegrityError("the coded model does not decode to the model that was encoded")
    return model


def parse(data: bytes, max_bytes: int) -> tuple[Description, memoryview, list[Decoder]]:
    """The description, the graph, and the tensors with their blocks; all sizes are checked against one another."""
    if len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise IntegrityError("this is not a coded model")
    _, version, packed_size, header_size, description_size, crc = HEAD.unpack_from(data)
    if version != _VERSION:
        raise Unsupported(f"the coded model has version {version}, this Penstock reads {_VERSION}", "upgrade")
    body = memoryview(data)[HEAD.size :]
    if packed_size > len(body) or description_size > header_size:
        raise IntegrityError("the coded model was cut off, or its sizes are wrong")
    if header_size - description_size > max_bytes:
        raise _too_large(header_size - description_size, max_bytes)
    if description_size > min(_MAX_DESCRIPTION_BYTES, max_bytes + _SMALL_DESCRIPTION_BYTES):
        raise IntegrityError(f"the description of the coded model takes {description_size} bytes, more than any does")
    packed = body[:packed_size]
    if zlib.crc32(packed) != crc:
        raise IntegrityError("the header of the coded model was changed")
    header = memoryview(inflate(packed, header_size))
    try:
        description = msgspec.msgpack.decode(header[:description_size], type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the description of the coded model cannot be read: {error}") from None
    graph = header[description_size:]
    sizes = _sizes(description, len(graph), max_bytes)
    return description, graph, _decoders(description, sizes, body[packed_size:])


def _sizes(description: Description, graph_bytes: int, max_bytes: int) -> list[int]:
    """The bytes of each tensor. Raises IntegrityError unless everything adds up to the model."""
    if description.model_bytes > max_bytes:
        raise _too_large(description.model_bytes, max_bytes)
    sizes = []
    for tensor in description.tensors:
        if tensor.dtype not in ITEM_SIZES or any(dim < 0 for dim in tensor.shape):
            raise IntegrityError(f"tensor '{tensor.name}' of the coded model has no such type or shape")
        sizes.append(prod(tensor.shape) * ITEM_SIZES[tensor.dtype])
    before = [tensor.graph_bytes for tensor in description.tensors]
    if min(before, default=0) < 0 or sum(before) > graph_bytes or sum(sizes) + graph_bytes != description.model_bytes:
        raise IntegrityError("the parts of the coded model do not add up to the model")
    return sizes


def _decoders(description: Description, sizes: list[int], body: memoryview) -> list[Decoder]:
    """The tensors with their blocks, which must fill ``body`` to its end."""
    found, at = [], 0
    for tensor, size in zip(description.tensors, sizes, strict=True):
        blocks = []
        for block_size in (size for stream in tensor.streams for size in stream.sizes):
            start = at + _CRC.size
            if block_size < 0 or start + block_size > len(body):
                raise IntegrityError("a block of the coded model lies beyond its end")
            block = body[start : start + block_size]
            if zlib.crc32(block) != _CRC.unpack_from(body, at)[0]:
                raise IntegrityError(f"a block of tensor '{tensor.name}' of the coded model was changed")
            blocks.append(block)
            at = start + block_size
        found.append(Decoder(tensor, blocks, size))
    if at != len(body):
        raise IntegrityError("the coded model goes on after its end")
    return found


def _batches(decoders: list[Decoder]) -> Iterator[list[Decoder]]:
    batch: list[Decoder] = []
    symbols = 0
    for decoder in decoders:
        batch.append(decoder)
        symbols += sum(block.symbols for block in decoder.blocks)
        if symbols >= _BATCH_SYMBOLS:
            yield batch
            batch, symbols = [], 0
    yield batch


def _too_large(size: int, max_bytes: int) -> IntegrityError:
    return IntegrityError(f"the coded model says that it decodes to {size} bytes, more than the {max_bytes} allowed")
