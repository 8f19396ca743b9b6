"""Fuzzes the messages of the process that runs a source's framework."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import numpy as np

from penstock.offline.convert.base import Axis, Exported, TensorLink, UnsupportedOperator
from penstock.offline.convert.worker import wire
from penstock.tensor import DataType, Signature, TensorSpec
from tests.fuzz.parts import pieces
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, contents

_SPEC = TensorSpec("x", DataType.FP32, (-1, 3))
_SENT: Sequence[wire.Answer] = (
    wire.Opened("Fake", "1", Signature((_SPEC,), (_SPEC,)), {"x": (Axis(0, "batch"),)}, ("note",)),
    wire.Arrays({"x": np.arange(6, dtype=np.float32).reshape(2, 3), "t": np.array([b"a", b"bc"], np.object_)}),
    wire.Calls(({"x": np.ones(2, np.float32)}, {"x": np.array([b"a"], np.object_)})),
    wire.Written(Exported("fake", (TensorLink("a", "b", "c"),), ("d",), ("e",))),
    wire.Refused("NotFound", "no", "", (UnsupportedOperator("op", "there", "avoid it"),)),
)


class SourceAnswerTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\xcf" + b"\xff" * 8,
        b"\xa5BYTES",
        b"\xa6Arrays",
    )

    def __init__(self) -> None:
        frames = [b"".join(wire.encode(message)) for message in _SENT]
        super().__init__([(data[:4], data[4:12], *pieces(data[12:])) for data in frames])

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        if len(data) > wire.PREFIX.size and random.random() < 0.8:
            body = min(int.from_bytes(data[4:12], "little"), len(data) - wire.PREFIX.size)
            data = wire.PREFIX.pack(len(data) - wire.PREFIX.size - body, body) + data[wire.PREFIX.size :]
        return data

    def decode(self, data: bytes) -> object:
        if len(data) < wire.PREFIX.size:
            return None
        header, body = wire.PREFIX.unpack_from(data)
        rest = data[wire.PREFIX.size :]
        if header + body != len(rest):
            return None
        message = wire.decode(rest[:header], bytearray(rest[header:]), wire.Answer)
        if not isinstance(message, wire.Arrays | wire.Calls):
            return msgspec.to_builtins(message)
        calls = message.calls if isinstance(message, wire.Calls) else (message.arrays,)
        arrays = [each for call in calls for each in call.items()]
        assert sum(touch(array) for _, array in arrays) <= 16 * len(data)
        return [(name, contents(array)) for name, array in arrays]
