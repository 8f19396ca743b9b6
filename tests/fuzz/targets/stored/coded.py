"""Fuzzes what comes in a bundle: coded models."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from onnx import helper, numpy_helper

from penstock.bundle.coded import decode, describe, encode
from penstock.errors import PenstockError
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Target

_HEAD = struct.Struct("<4sBIIII")
_MAX_BYTES = 1 << 17
_START = b"PSTC\1"


def _models() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    sparse = (rng.integers(1, 20, 900) * (rng.random(900) < 0.1) / 8).astype(np.float32)
    dense = rng.integers(-9, 9, (30, 20)).astype(np.int8)
    noise = rng.normal(size=1100).astype(np.float32)
    for arrays in ([sparse], [dense, sparse.astype(np.float16)], [np.ones(400), noise], [sparse * np.float32(1e9)], []):
        tensors = [numpy_helper.from_array(array, f"w{number}") for number, array in enumerate(arrays)]
        yield helper.make_model(helper.make_graph([], "g", [], [], tensors)).SerializeToString(deterministic=True)


def _seed(data: bytes) -> Seed:
    """Start, description, graph, and each block without its checksum."""
    *_, packed_size, _, description_size, _ = _HEAD.unpack_from(data)
    at = _HEAD.size + packed_size
    header = zlib.decompress(data[_HEAD.size : at], -15)
    sizes = [t.code_bytes for t in describe(data).tensors] + [t.gap_bytes for t in describe(data).tensors]
    # No seed has a stream of two blocks.
    assert sum(sizes) == len(data) - at
    blocks = []
    for tensor in describe(data).tensors:
        for size in (tensor.code_bytes, tensor.gap_bytes):
            if size:
                blocks.append(data[at + 4 : at + size])
                at += size
    return (_START, header[:description_size], header[description_size:], *blocks)


class CodedTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\xff" * 8,
        b"\xcf" + b"\xff" * 8,
        b"\xd3\x80" + bytes(7),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\xa6sparse",
        b"\xa7huffman",
        b"\xa7deflate",
        b"\xa8verbatim",
        b"\xa7float16",
        b"\xa4int8",
        b"\x11" * 8,
    )

    def __init__(self) -> None:
        self._models = set(_models())
        self._valid = [encode(model) for model in sorted(self._models)]
        self.seeds = [_seed(data) for data in self._valid]
        self._turn = 0

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        if len(parts) < 3 or random.random() < 0.1:
            return b"".join(parts)
        start, description, graph, *blocks = parts
        header = description + graph
        packer = zlib.compressobj(1, zlib.DEFLATED, -15)
        packed = packer.compress(header) + packer.flush()
        head = start + struct.pack("<IIII", len(packed), len(header), len(description), zlib.crc32(packed))
        return b"".join((head, packed, *(struct.pack("<I", zlib.crc32(block)) + block for block in blocks)))

    def run(self, data: bytes) -> None:
        try:
            summary = describe(data, _MAX_BYTES)
        except PenstockError:
            pass
        else:
            assert summary.model_bytes <= _MAX_BYTES
        try:
            model = decode(data, _MAX_BYTES)
        except PenstockError:
            pass
        else:
            assert model in self._models
        self._turn = (self._turn + 1) % len(self._valid)
        assert decode(self._valid[self._turn]) in self._models
