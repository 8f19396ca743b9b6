from __future__ import annotations

import contextlib

import numpy as np
import pytest

from benchmarks.zoo.caffe import caffemodel
from penstock.errors import PenstockError
from penstock.offline.convert.caffe.caffemodel import read_caffemodel

WEIGHTS = {
    "conv": [np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2), np.ones(2, np.float32)],
    "fc": [np.zeros((3, 4), np.float32)],
}


def test_both_forms_are_read() -> None:
    for is_old in (False, True):
        found = read_caffemodel(caffemodel(WEIGHTS, is_old=is_old))
        assert {name: [blob.size for blob in blobs] for name, blobs in found.items()} == {"conv": [24, 2], "fc": [12]}
        np.testing.assert_array_equal(found["conv"][0], WEIGHTS["conv"][0])
    assert found["fc"][0].shape == (1, 1, 3, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "contains no layer"),
        (b"\x89HDF\r\n\x1a\n more", "HDF5"),
        (b"\xff" * 40, "truncated or corrupt"),
        (caffemodel(WEIGHTS)[:-5], "truncated or corrupt"),
        (b"\x12\x02\x0a\x00", "format V0"),
        (b"\xa2\x06\x0a\x0a\x01a\x3a\x05\x3a\x03\x0a\x01\x05", "has 0 values"),
    ],
)
def test_broken_weights_are_explained(data: bytes, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        read_caffemodel(data)


def test_every_damaged_byte_gives_weights_or_an_error() -> None:
    data = caffemodel(WEIGHTS)
    for place in range(len(data)):
        damaged = [data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :] for bits in (1, 0x40, 0x80, 0xFF)]
        for one in (*damaged, data[:place]):
            with contextlib.suppress(PenstockError):
                read_caffemodel(one)
