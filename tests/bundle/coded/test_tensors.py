from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.coded.lanes import decode_blocks
from penstock.bundle.coded.tensors import (
    Coded,
    CodedTensor,
    Decoder,
    deflate,
    encode_tensor,
    entropy_bytes,
    inflate,
)
from penstock.errors import IntegrityError
from penstock.tensor import Array

RANDOM = np.random.default_rng(0)


def coded(array: Array) -> Coded:
    return encode_tensor(array.data.cast("B"), array.itemsize, 12)


def decoded(array: Array, found: Coded) -> bytes:
    tensor = CodedTensor("w", array.dtype.name, [array.size], 0, found.codec, found.half, found.gap_bits, found.streams)
    return restored(tensor, found, array.nbytes)


def restored(tensor: CodedTensor, found: Coded, size: int) -> bytes:
    decoder = Decoder(tensor, [memoryview(block) for block in found.blocks], size)
    return bytes(decoder.finish(decode_blocks(decoder.blocks)))


CASES = {
    "noise": (RANDOM.integers(0, 1 << 32, 5000, dtype=np.uint32), "verbatim", False),
    "few values": (RANDOM.choice(np.float32([0.1, -0.3, 0.7]), 5000), "huffman", False),
    "few values that FP16 holds": (RANDOM.choice(np.float32([0.5, -0.25, 2]), 5000), "huffman", True),
    "mostly zeros": (np.where(RANDOM.random(5000) < 0.05, np.float32(0.5), np.float32(0)), "sparse", True),
    "integers": (RANDOM.integers(-2, 3, 5000).astype(np.int8), "huffman", False),
    "one value": (np.full(5000, 3, np.int64), "huffman", False),
    "a rule that deflate sees": (np.tile(np.arange(100, dtype=np.uint8), 50), "deflate", False),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_tensor_gets_its_codec_and_comes_back(name: str) -> None:
    array, codec, half = CASES[name]
    found = coded(array)
    assert (found.codec, found.half) == (codec, half)
    assert found.cost <= array.nbytes + 16
    assert decoded(array, found) == array.tobytes()


def test_zeros_with_a_sign_and_numbers_that_are_none_keep_their_bits() -> None:
    patterns = np.uint32([0x00000000, 0x80000000, 0x7FC00001, 0xFFC00002, 0x7F800000])
    array = RANDOM.choice(patterns, 4000).view(np.float32)
    assert decoded(array, coded(array)) == array.tobytes()


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_come_back(data: bytes, item_size: int) -> None:
    array = np.frombuffer(data[: len(data) // item_size * item_size], f"<u{item_size}")
    assert decoded(array, coded(array)) == array.tobytes()


def test_inflating_takes_exactly_the_size_that_was_said() -> None:
    packed = deflate(bytes(1000))
    assert inflate(packed, 1000) == bytes(1000)
    for size in (999, 1001):
        with pytest.raises(IntegrityError, match="a different size"):
            inflate(packed, size)
    with pytest.raises(IntegrityError, match="a different size"):
        inflate(packed + b"x", 1000)
    with pytest.raises(IntegrityError, match="does not inflate"):
        inflate(b"\xff" * 20, 1000)


@pytest.mark.parametrize(
    "change",
    [
        {"streams": []},
        {"codec": "sparse"},
        {"codec": "deflate"},
        {"half": True},
        {"dtype": "float64"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_a_description_that_does_not_fit_its_blocks_is_refused(change: dict[str, object]) -> None:
    array = CASES["few values"][0]
    found = coded(array)
    facts = {"dtype": "float32", "codec": found.codec, "half": found.half, "streams": found.streams, **change}
    tensor = CodedTensor(name="w", shape=[array.size], graph_bytes=0, gap_bits=found.gap_bits, **facts)
    with pytest.raises(IntegrityError):
        restored(tensor, found, array.nbytes)


def test_entropy() -> None:
    assert entropy_bytes(np.zeros(80, np.int64)) == 0
    assert entropy_bytes(np.arange(80) % 2) == 10
    assert entropy_bytes(np.arange(256)) == 256
    assert entropy_bytes(np.zeros(0, np.int64)) == 0
