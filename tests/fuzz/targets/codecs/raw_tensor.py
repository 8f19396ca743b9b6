"""Fuzzes tensors as raw bytes: a line with the datatype and the shape, and the elements."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from penstock.tensor import DataType, from_wire, to_wire
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces, tokens
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, contents

_TYPES = list(DataType)
_NUMBER = re.compile(r"-?[0-9]{1,30}")


def _seed(datatype: DataType, shape: Sequence[int]) -> Seed:
    line = b"%d %b" % (_TYPES.index(datatype), b",".join(b"%d" % size for size in shape))
    count = int(np.prod(shape))
    data = bytes(count * datatype.itemsize) if datatype.itemsize else b"\x03\0\0\0abc" * count
    return (*tokens(line), b"\n", *pieces(data))


class RawTensorTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (b",0", b",-1", b",1099511627776", b"\xff\xff\xff\xff", b"\0\0\0\0", b",1" * 33)

    def __init__(self) -> None:
        shapes: Sequence[Sequence[int]] = ((), (2,), (2, 1, 3), (0, 5), (1,) * 5)
        super().__init__([_seed(datatype, shape) for datatype in _TYPES for shape in shapes])

    def split(self, data: bytes) -> Seed:
        line, end, rest = data.partition(b"\n")
        return (*tokens(line), end, *pieces(rest))

    def decode(self, data: bytes) -> object:
        line, _, body = data.partition(b"\n")
        kind, _, sizes = line.decode("latin-1").partition(" ")
        shape = [int(size) for size in sizes.split(",") if _NUMBER.fullmatch(size)]
        datatype = _TYPES[int(kind) % len(_TYPES) if _NUMBER.fullmatch(kind) else 0]
        array = from_wire(body, datatype, shape)
        assert array.shape == tuple(shape)
        assert touch(array) <= len(body)
        assert bytes(to_wire(array)) == body
        return contents(array)
