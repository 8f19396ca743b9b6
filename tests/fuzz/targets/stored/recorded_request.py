"""Fuzzes the files of recorded requests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from penstock.online.repository.loading.recorded_requests import decode, encode, folder_of
from penstock.request import InferRequest
from penstock.tensor import Array
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces, words
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, contents

_TEXT = np.array([b"a", b"bcd"], np.object_)
_INPUTS: Sequence[dict[str, Array]] = (
    {"x": np.ones((2, 2), np.float32)},
    {"t": _TEXT, "b": np.array([True]), "e": np.empty((0, 3), np.int8)},
    {},
)


class RecordedRequestTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b'"shape":[4294967296,0]',
        b'"binary_data_size":-4',
        b'"BYTES"',
        b"[" * 400,
        b"null",
        b"\xff\xff\xff\xff",
    )

    def __init__(self) -> None:
        requests = [InferRequest("m", inputs, parameters={"n": 1, "s": "é", "f": 0.5}) for inputs in _INPUTS]
        super().__init__([self.split(encode(request)) for request in requests])

    def split(self, data: bytes) -> Seed:
        line, end, body = data.partition(b"\n")
        name, space, number = line.partition(b" ")
        size = int(number) if number.isdigit() and len(number) < 9 else 0
        return (name + space, number, end, *words(body[:size]), *pieces(body[size:]))

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        head, end, body = data.partition(b"\n")
        if random.random() < 0.6:
            head = head.partition(b" ")[0] + b" %d" % (body.rfind(b"}") + 1)
        return head + end + body

    def decode(self, data: bytes) -> object:
        folder = folder_of("/root", data[:400].decode("latin-1") or "m")
        assert folder.parent.as_posix() == "/root"
        assert len(folder.name) <= 255
        request = decode(data, "m")
        assert sum(map(touch, request.inputs.values())) <= len(data)
        again = decode(encode(request), "m")
        found = [(name, contents(array)) for name, array in request.inputs.items()]
        assert found == [(name, contents(array)) for name, array in again.inputs.items()]
        assert repr(again.parameters) == repr(request.parameters)
        return found
