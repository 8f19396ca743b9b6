from __future__ import annotations

import hashlib
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from networks import mlp
from penstock.bundle.coded import CodingOptions, Summary, container, decode, describe, encode
from penstock.bundle.coded.payloads import find_payloads
from penstock.errors import IntegrityError, InvalidArgument, InvalidModel, PenstockError, ResourceExhausted, Unsupported
from penstock.tensor import Array

_HEAD = struct.Struct("<4sBIIII")
RNG = np.random.default_rng(0)


def model_of(*arrays: Array, raw: bool = True) -> bytes:
    """A model whose initialisers are ``arrays``."""
    tensors = [numpy_helper.from_array(array, f"w{number}") for number, array in enumerate(arrays)]
    if not raw:
        tensors = [helper.make_tensor(t.name, t.data_type, t.dims, numpy_helper.to_array(t).ravel()) for t in tensors]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [], tensors)
    return bytes(helper.make_model(graph).SerializeToString(deterministic=True))


def sparse(shape: tuple[int, ...], kept: float, values: int, dtype: Any = np.float32) -> Array:
    drawn = RNG.integers(1, values + 1, shape) * (RNG.random(shape) < kept)
    return (drawn / 8 if np.dtype(dtype).kind == "f" else drawn).astype(dtype)


def reheaded(data: bytes, change: Callable[[list[Any], bytes], bytes | None]) -> bytes:
    """``data`` with its description, as plain lists, changed; the checksums of the header are recomputed."""
    magic, version, packed_size, _, description_size, _ = _HEAD.unpack_from(data)
    header = zlib.decompress(data[_HEAD.size : _HEAD.size + packed_size], -15)
    description = msgspec.msgpack.decode(header[:description_size])
    graph = header[description_size:]
    graph = change(description, graph) or graph
    return headed(msgspec.msgpack.encode(description), graph, data[_HEAD.size + packed_size :], magic, version)


def headed(description: bytes, graph: bytes, body: bytes, magic: bytes = b"PSTC", version: int = 1) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(description + graph) + packer.flush()
    size = len(description) + len(graph)
    return _HEAD.pack(magic, version, len(packed), size, len(description), zlib.crc32(packed)) + packed + body


# Round trips

_ARRAYS = {
    "sparse": sparse((300, 100), 0.08, 32),
    "dense shared": sparse((64, 64), 2.0, 20),
    "int8": RNG.integers(-40, 40, (70, 70)).astype(np.int8),
    "uint8 sparse": sparse((90, 90), 0.1, 200, np.uint8),
    "noise": RNG.normal(size=(60, 60)).astype(np.float32),
    "half": sparse((50, 50), 0.2, 30, np.float16),
    "double": sparse((50, 50), 0.2, 30, np.float64),
    "int64": sparse((50, 50), 0.2, 30, np.int64),
    "constant": np.full((40, 40), 0.1, np.float32),
    "zeros": np.zeros((40, 40), np.float32),
    "one value": np.eye(1, 5000, 4999, dtype=np.float32),
    "gap of one kind": (np.arange(5000) % 5 == 4).astype(np.float32),
    "oddities": np.array([np.nan, -0.0, 0, np.inf, -np.inf, 1e-45] * 50, np.float32),
    "not in FP16": RNG.choice(np.float32([1e9, 0.1, 1e-9, 0]), 3000),
    "many values": RNG.integers(0, 3000, 30000).astype(np.int32),
    "too many values": RNG.integers(0, 9000, 30000).astype(np.int32),
    "tiny": np.zeros(3, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "several blocks": sparse((140_000,), 0.9, 60),
}


@pytest.mark.parametrize("name", _ARRAYS)
def test_the_very_bytes_come_back(name: str) -> None:
    model = model_of(_ARRAYS[name])
    data = encode(model)
    assert decode(data) == model
    assert data == encode(model)
    assert describe(data).model_bytes == len(model)


def test_all_together_and_in_another_form() -> None:
    model = model_of(*_ARRAYS.values())
    assert decode(encode(model)) == model
    floats = model_of(_ARRAYS["sparse"], raw=False)
    assert not find_payloads(floats)
    assert decode(encode(floats)) == floats


def test_real_models_come_back() -> None:
    model = mlp().data
    assert [payload.name for payload in find_payloads(model)] == [
        tensor.name for tensor in onnx.load_model_from_string(model).graph.initializer if tensor.raw_data
    ]
    assert decode(encode(model)) == model
    assert decode(encode(b"")) == b""


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(1, 300), st.sampled_from("bBhHifd"), st.integers(8, 15))
@settings(max_examples=60, deadline=None)
def test_any_tensor_comes_back(size: int, kept: float, values: int, kind: str, limit: int) -> None:
    rng = np.random.default_rng(size)
    drawn = rng.integers(-values, values + 1, size) * (rng.random(size) < kept)
    model = model_of((drawn % 256 if kind == "B" else drawn).astype(np.dtype(kind)))
    assert decode(encode(model, CodingOptions(limit, 0))) == model


def test_sizes_are_near_the_entropy() -> None:
    found = describe(encode(model_of(sparse((300, 784), 0.08, 32), sparse((512, 512), 2.0, 100))))
    for tensor in found.tensors:
        coded = tensor.code_bytes + tensor.gap_bytes
        # A Huffman code loses some hundredths of a bit a symbol, and each lane of 512 symbols a byte.
        assert tensor.entropy_bytes < coded < 1.03 * tensor.entropy_bytes
    first, second = found.tensors
    assert (first.codec, second.codec) == ("sparse", "huffman")
    assert first.sparsity == pytest.approx(0.92, abs=0.01)
    assert (first.symbols, second.symbols, second.sparsity) == (32, 100, 0)
    assert found.coded_bytes == found.header_bytes + sum(t.code_bytes + t.gap_bytes for t in found.tensors)


# Refusals


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(InvalidModel, match="not an ONNX file"):
        encode(b"\xff" * 50)
    with pytest.raises(InvalidArgument, match="8 to 15 bits"):
        encode(b"", CodingOptions(max_code_bits=7))


MODEL = model_of(sparse((60, 60), 0.1, 12), sparse((40, 40), 2.0, 9), _ARRAYS["noise"])
DATA = encode(MODEL)


def test_every_byte_counts() -> None:
    for at in [*range(60), *range(60, len(DATA), 11)]:
        changed = bytearray(DATA)
        changed[at] ^= 1 << at % 8
        with pytest.raises(PenstockError):
            decode(bytes(changed))


def test_every_length_counts() -> None:
    for size in range(0, len(DATA), 31):
        with pytest.raises(IntegrityError):
            decode(DATA[:size])
    with pytest.raises(IntegrityError, match="has data after its last block"):
        decode(DATA + b"\0")


def test_a_newer_version() -> None:
    with pytest.raises(Unsupported, match="version 2"):
        decode(DATA[:4] + b"\2" + DATA[5:])


def test_what_is_larger_than_allowed_takes_no_memory() -> None:
    large = encode(model_of(np.zeros(5_000_000, np.float32)))
    assert len(large) < 2000
    tracemalloc.start()
    with pytest.raises(IntegrityError, match="decodes to 200000.. bytes, but at most 1000000 are allowed"):
        decode(large, 1_000_000)
    with pytest.raises(IntegrityError, match="but at most"):
        decode(headed(b"", b"\0" * 3_000_000, b""), 1_000_000)
    with pytest.raises(IntegrityError, match="more than the limit"):
        decode(headed(b"\0" * 3_000_000, b"", b""), 1_000_000)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000  # of which 3 MB were there before
    tracemalloc.stop()


def test_zeros_take_their_own_memory_twice_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    small = encode(model_of(np.zeros(20_000_000, np.int8)))
    tracemalloc.start()
    assert len(decode(small)) > 20_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 45_000_000
    monkeypatch.setattr(container, "usable_memory", lambda: 30_000_000)
    with pytest.raises(ResourceExhausted, match="takes 38 MiB of memory"):
        decode(small)


def _tensor(description: list[Any], number: int = 0) -> list[Any]:
    found: list[Any] = description[2][number]
    return found


def _set(*path: int | Any) -> Callable[[list[Any], bytes], None]:
    *steps, last, value = path

    def change(description: list[Any], _: bytes) -> None:
        place = description
        for step in steps:
            place = place[step]
        place[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set(0, 10),  # size of the model
        _set(0, 2**62),
        _set(0, -1),
        _set(1, hashlib.sha256(b"").digest()),
        _set(2, []),
        _set(2, 0, 1, "float23"),
        _set(2, 0, 1, "float16"),
        _set(2, 0, 2, [60, 61]),
        _set(2, 0, 2, [-60, -60]),
        _set(2, 0, 2, [2**40, 2**40]),
        _set(2, 0, 3, -1),  # bytes of graph before it
        _set(2, 0, 3, 10**9),
        _set(2, 0, 4, "huffman"),
        _set(2, 0, 4, "verbatim"),
        _set(2, 0, 4, "deflate"),
        _set(2, 0, 4, "zstd"),
        _set(2, 1, 4, "sparse"),
        _set(2, 2, 4, "huffman"),
        _set(2, 0, 5, False),  # codebook in FP16
        _set(2, 0, 6, 0),  # bits of gaps
        _set(2, 0, 6, 13),
        _set(2, 0, 6, 1),
        _set(2, 0, 7, []),
        _set(2, 0, 7, 0, 0, 1),  # count of symbols
        _set(2, 0, 7, 0, 0, 2**40),
        _set(2, 0, 7, 1, 0, 3601),
        _set(2, 0, 7, 0, 1, b""),  # alphabet
        _set(2, 0, 7, 0, 1, b"\1"),
        _set(2, 0, 7, 0, 1, b"\1\0" * 5000),
        _set(2, 0, 7, 0, 1, b"\0\0" * 12),
        _set(2, 0, 7, 0, 2, b""),  # lengths
        _set(2, 0, 7, 0, 2, b"\x11" * 6),
        _set(2, 0, 7, 0, 2, b"\xff" * 6),
        _set(2, 0, 7, 0, 3, []),  # sizes of blocks
        _set(2, 0, 7, 0, 3, [-1]),
        _set(2, 0, 7, 0, 3, [2**62]),
        _set(2, 0, 7, 0, 3, [1, 1]),
    ],
)
def test_a_description_that_lies_is_refused(change: Callable[[list[Any], bytes], None]) -> None:
    with pytest.raises(IntegrityError):
        decode(reheaded(DATA, change))


def test_the_harness_itself_changes_nothing() -> None:
    assert decode(reheaded(DATA, lambda description, graph: None)) == MODEL


def test_a_block_cannot_say_more_than_it_has_bits() -> None:
    def claim(description: list[Any], graph: bytes) -> None:
        tensor = _tensor(description, 1)
        tensor[2] = [40, 4000]
        tensor[7][0][0] = 160_000
        tensor[7][0][3] = [*tensor[7][0][3], 0, 0]
        description[0] += 4 * (160_000 - 1600)

    with pytest.raises(IntegrityError):
        decode(reheaded(DATA, claim))


def test_the_summary_says_where_the_bytes_go() -> None:
    found = describe(DATA)
    assert isinstance(found, Summary)
    assert [tensor.codec for tensor in found.tensors] == ["sparse", "huffman", "deflate"]
    assert [tensor.name for tensor in found.tensors] == ["w0", "w1", "w2"]
    assert found.ratio == len(MODEL) / len(DATA)
    arrays = [numpy_helper.to_array(t) for t in onnx.load_model_from_string(MODEL).graph.initializer]
    assert [tensor.sparsity for tensor in found.tensors] == [np.mean(array == 0) for array in arrays]
