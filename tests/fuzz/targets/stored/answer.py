"""Fuzzes what comes from Redis: answers as the cache's second tier stores them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

import numpy as np

from penstock.errors import IntegrityError
from penstock.online.cache.answer import freeze, from_bytes
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array, DataType, to_wire
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces
from tests.fuzz.planes import touch
from tests.fuzz.target import Target

_START = 8
_MAX_GROWTH = 64
_SLACK_BYTES = 4096


def _seeds() -> list[Seed]:
    outputs: list[dict[str, Array]] = [{d.value: np.zeros((2, 1), d.dtype)} for d in DataType if d.itemsize]
    text = np.array([b"a", b"", b"xyz"], np.object_).reshape(3, 1)
    outputs += [{"t": text}, {}, {"a": np.arange(100, dtype=np.float32), "b": text}, {"s": np.float32(3).reshape(())}]
    seeds = []
    for number, each in enumerate(outputs):
        parameters = {"n": number, "f": 0.5, "s": "é", "b": True} if number % 3 else {}
        stored = freeze(InferResponse("m", "1", each, parameters=parameters)).to_bytes()
        size = struct.unpack_from("<I", stored, 4)[0]
        head = stored[_START : _START + size]
        seeds.append((stored[:4], stored[4:_START], *pieces(head), stored[_START + size :]))
    return seeds


class AnswerTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\xff",
        b"\xc0",
        b"\xcb\x7f\xf8" + bytes(6),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xcf" + b"\xff" * 8,
        b"\xa4FP32",
        b"\xa5BYTES",
        b"\x92\xce\xff\xff\xff\xff\x00",
        b"\x91" * 2000,
    )

    def __init__(self) -> None:
        self.seeds = _seeds()
        self._valid = [b"".join(seed) for seed in self.seeds]
        self._turn = 0

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        if len(parts) > 3 and len(data) > _START and random.random() < 0.6:
            head = len(data) - len(parts[-1]) - _START
            data = data[:4] + struct.pack("<I", max(0, head)) + data[_START:]
        return data

    def run(self, data: bytes) -> None:
        try:
            answer = from_bytes(data)
        except IntegrityError:
            pass
        else:
            held = sum(touch(array) for array in answer.outputs.values())
            assert held <= _MAX_GROWTH * len(data) + _SLACK_BYTES
            assert answer.size_bytes >= held
            again = from_bytes(answer.to_bytes())
            assert repr(again.parameters) == repr(answer.parameters)
            for name, array in answer.to(InferRequest("m", {})).outputs.items():
                assert not array.flags.writeable
                assert bytes(to_wire(array)) == bytes(to_wire(again.outputs[name]))
        self._turn = (self._turn + 1) % len(self._valid)
        valid = self._valid[self._turn]
        assert from_bytes(valid).to_bytes() == valid
