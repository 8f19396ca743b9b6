"""The container of a coded model: compresses an ONNX file, and restores it bit for bit.

The file, all numbers little-endian::

    magic "PSTC"; u8 version; u32 sizes of packed header, unpacked header and description; u32 CRC-32 of the packed header
    header, raw deflate: the description (msgpack, ``Description``), then the ONNX file without the data of coded tensors
    blocks: the blocks of each tensor, in file order; a CRC-32 precedes each block; see ``tensors`` and ``lanes``

Encoding cuts the raw data of initialisers out of the model file, and decoding inserts the data again, so decoding does not parse ONNX.
The description contains the SHA-256 of the model file. Decoding fails if the decoded bytes have another SHA-256.
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
"""Maximum size of an ONNX file, in bytes."""
MAGIC, _VERSION = b"PSTC", 1
HEAD = struct.Struct("<4sBIIII")
_CRC = struct.Struct("<I")
_BATCH_SYMBOLS = 1 << 21
"""Number of symbols that are decoded together. With this number, there are enough lanes for speed, and the memory is a few MiB."""
_MAX_DESCRIPTION_BYTES = 16 << 20
_SMALL_DESCRIPTION_BYTES = 64 << 10
"""The limit on the size of a description is at least this, even for small models."""
_SMALL_BYTES = 4096
"""A tensor below this size stays in the header if Huffman codes do not make it smaller. The whole header is deflated."""


class CodingOptions(msgspec.Struct, frozen=True):
    """Options of the encoding."""

    max_code_bits: int = 11
    """Maximum length of a Huffman code, 8 to 15 bits. Longer codes decode more slowly. Large alphabets raise this maximum."""
    min_tensor_bytes: int = 64
    """Smaller tensors stay in the graph, and are not coded."""


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description in the header: size and digest of the model file, and its coded tensors."""

    model_bytes: int
    sha256: bytes
    tensors: list[CodedTensor]


def encode(model: bytes, options: CodingOptions | None = None) -> bytes:
    """Encode the ONNX file ``model``. ``decode`` returns the same bytes.

    Raises InvalidModel if ``model`` is not an ONNX file, InvalidArgument for invalid options, Unsupported above ``MAX_BYTES``.
    """
    options = options or CodingOptions()
    if not 8 <= options.max_code_bits <= 15 or options.min_tensor_bytes < 0:
        raise InvalidArgument(
            f"invalid coding options: {options}", "give codes of 8 to 15 bits, and sizes of at least 0"
        )
    if len(model) > MAX_BYTES:
        raise Unsupported(f"the model takes {len(model) >> 20} MiB, but an ONNX file can have at most 2 GiB")
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
        raise Unsupported(
            "the model's codebooks are too large for the header of a coded model",
            "cluster the weights first, with penstock share",
        )
    header = b"".join((description, *graph))
    packed = deflate(header)
    head = HEAD.pack(MAGIC, _VERSION, len(packed), len(header), len(description), zlib.crc32(packed))
    return b"".join((head, packed, *blocks))


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Decode a coded model to the original model file.

    Raises IntegrityError if ``data`` was modified or decodes to more than ``max_bytes``; ResourceExhausted if there is not enough
    memory; Unsupported if a newer Penstock wrote ``data``. Sizes are checked before memory is allocated.
    """
    description, graph, decoders = parse(data, max_bytes)
    # A coded model of zeros is tiny, so only the declared size shows how much memory decoding needs.
    if 2 * description.model_bytes > (usable := usable_memory()) > 0:
        raise ResourceExhausted(
            f"decoding the coded model takes {2 * description.model_bytes >> 20} MiB of memory, "
            f"but only {usable >> 20} MiB are available",
            "open it on a machine with more memory",
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


_decode_description = msgspec.msgpack.Decoder(Description).decode


def parse(data: bytes, max_bytes: int) -> tuple[Description, memoryview, list[Decoder]]:
    """The description, the graph, and the tensors with their blocks. All sizes are checked for consistency."""
    if len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise IntegrityError("this is not a coded model")
    _, version, packed_size, header_size, description_size, crc = HEAD.unpack_from(data)
    if version != _VERSION:
        raise Unsupported(f"the coded model has version {version}, but this Penstock reads {_VERSION}", "upgrade")
    body = memoryview(data)[HEAD.size :]
    if packed_size > len(body) or description_size > header_size:
        raise IntegrityError("the coded model was cut off, or its sizes are wrong")
    if header_size - description_size > max_bytes:
        raise _too_large(header_size - description_size, max_bytes)
    if description_size > min(_MAX_DESCRIPTION_BYTES, max_bytes + _SMALL_DESCRIPTION_BYTES):
        raise IntegrityError(
            f"the description of the coded model takes {description_size} bytes, which is more than the limit"
        )
    packed = body[:packed_size]
    if zlib.crc32(packed) != crc:
        raise IntegrityError("the header of the coded model was changed")
    header = memoryview(inflate(packed, header_size))
    try:
        description = _decode_description(header[:description_size])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"the description of the coded model cannot be read: {error}") from None
    graph = header[description_size:]
    sizes = _sizes(description, len(graph), max_bytes)
    return description, graph, _decoders(description, sizes, body[packed_size:])


def _sizes(description: Description, graph_bytes: int, max_bytes: int) -> list[int]:
    """The decoded bytes of each tensor. Raises IntegrityError unless the parts add up to the model."""
    if description.model_bytes > max_bytes:
        raise _too_large(description.model_bytes, max_bytes)
    sizes = []
    for tensor in description.tensors:
        if tensor.dtype not in ITEM_SIZES or any(dim < 0 for dim in tensor.shape):
            raise IntegrityError(f"tensor '{tensor.name}' of the coded model has an invalid type or shape")
        sizes.append(prod(tensor.shape) * ITEM_SIZES[tensor.dtype])
    before = [tensor.graph_bytes for tensor in description.tensors]
    if min(before, default=0) < 0 or sum(before) > graph_bytes or sum(sizes) + graph_bytes != description.model_bytes:
        raise IntegrityError("the sizes of the coded model's parts do not add up to the size of the model")
    return sizes


def _decoders(description: Description, sizes: list[int], body: memoryview) -> list[Decoder]:
    """The tensors with their blocks. Raises IntegrityError unless the blocks fill ``body`` exactly."""
    found, at = [], 0
    for tensor, size in zip(description.tensors, sizes, strict=True):
        blocks = []
        for block_size in (size for stream in tensor.streams for size in stream.sizes):
            start = at + _CRC.size
            if block_size < 0 or start + block_size > len(body):
                raise IntegrityError("a block of the coded model extends beyond the end of the file")
            block = body[start : start + block_size]
            if zlib.crc32(block) != _CRC.unpack_from(body, at)[0]:
                raise IntegrityError(f"a block of tensor '{tensor.name}' of the coded model was changed")
            blocks.append(block)
            at = start + block_size
        found.append(Decoder(tensor, blocks, size))
    if at != len(body):
        raise IntegrityError("the coded model has data after its last block")
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
    return IntegrityError(f"the coded model decodes to {size} bytes, but at most {max_bytes} are allowed")
