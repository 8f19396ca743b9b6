"""Fuzzes the messages between a process instance and its child, and the tensors that they announce."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec
import numpy as np

from penstock.online.instances import process_channel as messages
from penstock.online.instances.tensor_arena import TensorArena
from penstock.request import InferRequest
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import resized, sized
from tests.fuzz.planes import touch
from tests.fuzz.target import DecoderTarget, attempt, contents

_MAX_ARENA_BYTES = 1 << 20


class ChannelTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\xcf" + b"\xff" * 8,
        b"\xa5BYTES",
        b"\xa8Executed",
    )

    def __init__(self) -> None:
        self._arena = TensorArena.create(_MAX_ARENA_BYTES)
        self._tensors = {"x": np.arange(6, dtype=np.float32), "t": np.array([b"a", b"bc"], np.object_)}
        slots = self._arena.write(self._tensors)
        sent = (
            messages.Forwarded(slots),
            messages.Executed([slots, messages.Failed("NotFound", "no", ""), None], {"run": (1, 5)}),
            messages.Answered(1, slots, True, {}),
            messages.Asked(1, InferRequest("m", {}), slots, False),
            messages.Said(20, "text"),
            messages.MetricChanged("n", "gauge", "h", {"a": "b"}, 0.5, True),
        )
        super().__init__([sized(msgspec.msgpack.encode(message)) for message in sent])

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        return resized(data) if random.random() < 0.8 else data

    def split(self, data: bytes) -> Seed:
        return sized(data[4:])

    def decode(self, data: bytes) -> object:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(data)
            there.close()
            try:
                message = messages.Channel(here).receive()
            except (EOFError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                return type(error).__name__
        return type(message).__name__, [attempt(partial(self._read, outcome)) for outcome in _outcomes(message)]

    def _read(self, outcome: messages.OutcomeSlots) -> object:
        found = messages.read_outcome(outcome, self._arena)
        if not isinstance(found, dict):
            return repr(found)
        assert sum(map(touch, found.values())) <= _MAX_ARENA_BYTES * max(1, len(found))
        return [(name, contents(array)) for name, array in found.items()]

    def close(self) -> None:
        self._arena.close()


def _outcomes(message: messages.Message) -> Sequence[messages.OutcomeSlots]:
    match message:
        case messages.Executed():
            return message.outcomes
        case messages.Forwarded():
            return [message.outputs]
        case messages.Answered() | messages.Replied():
            return [message.outcome]
    return []
