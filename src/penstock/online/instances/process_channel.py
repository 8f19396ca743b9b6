"""What a process instance and its child say to each other: messages over a socket pair, tensors not among them.

Each is its length and its MessagePack form. With most engines one message answers another. A Python model's process and its parent
talk both ways at once: while the model executes it may ask other models, and its answers may come after it has executed::

    parent                          child
    Execute   ──────────────────▶             requests; their inputs lie in the arena of inputs
              ◀──────────────────   Answered  one answer of a decoupled model, or the question whether any is wanted
    Taken     ──────────────────▶             the tensors have been copied, so their arena is free
              ◀──────────────────   Asked     a request to another model
    Taken, Replied … ───────────▶             its answers, each followed by the child's Taken
              ◀──────────────────   Executed  the outcomes, which lie in the arena of outputs
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from penstock.artifact import FileEntry
from penstock.errors import PenstockError, revive
from penstock.online.instances.tensor_arena import TensorSlot
from penstock.request import InferRequest
from penstock.tensor import Signature, TensorSpec

_LENGTH = struct.Struct("<I")
_READ = 1 << 16

Stages = dict[str, tuple[int, int]]
"""By the name of a stage how often it ran and how many nanoseconds it took, since the last message that told."""


class Load(msgspec.Struct, tag=True):
    """To the child: load the model, whose files are in the memory that it inherited."""

    engine: str
    format: str
    digest: str
    path: str
    """Where the bytes came from; empty if from no file."""
    options: dict[str, Any]
    cores: tuple[int, ...]
    """Core ids to run on; empty: any."""
    name: str = ""
    """As in ``Artifact``."""
    beside: tuple[FileEntry, ...] = ()
    """As in ``Artifact``; without a ``path`` their contents follow the main file's bytes."""


class Loaded(msgspec.Struct, tag=True):
    signature: Signature
    optional_inputs: tuple[TensorSpec, ...] = ()
    """Those beside the signature's that need not be given."""
    decoupled: bool = False
    max_batch: int | None = None
    """As of a ``RequestModel``, which a Python model is."""


class Forward(msgspec.Struct, tag=True):
    inputs: list[TensorSlot]


class Forwarded(msgspec.Struct, tag=True):
    outputs: list[TensorSlot]


class Failed(msgspec.Struct, tag=True):
    kind: str
    """Name of the class in ``penstock.errors``."""
    message: str
    hint: str

    @classmethod
    def of(cls, error: PenstockError) -> Failed:
        return cls(type(error).__name__, error.message, error.hint)

    def error(self) -> PenstockError:
        """The error anew."""
        return revive(self.kind, self.message, self.hint)


class Execute(msgspec.Struct, tag=True):
    first: int
    """Number of the first request; the others follow."""
    requests: list[InferRequest]
    """Without their inputs, which are told apart."""
    inputs: list[list[TensorSlot]]


Told = list[TensorSlot] | Failed | None
"""The outcome of a request: its outputs, or the error; None: none yet."""


class Executed(msgspec.Struct, tag=True):
    outcomes: list[Told]
    stages: Stages


class Answered(msgspec.Struct, tag=True):
    number: int
    outcome: Told
    final: bool
    stages: Stages


class Taken(msgspec.Struct, tag=True):
    """The tensors of the other's last message have been copied."""

    wanted: bool = True
    """Whether anybody wants more answers."""


class Asked(msgspec.Struct, tag=True):
    number: int
    request: InferRequest
    """Without its inputs."""
    inputs: list[TensorSlot]
    decoupled: bool


class Replied(msgspec.Struct, tag=True):
    number: int
    """Of the question."""
    outcome: Told
    final: bool
    model: tuple[str, str]
    """Name and version of who answers."""


class Dropped(msgspec.Struct, tag=True):
    """No more answers to the question ``number`` are wanted."""

    number: int


class Said(msgspec.Struct, tag=True):
    """A line for the server's log."""

    level: int
    text: str


class MetricChanged(msgspec.Struct, tag=True):
    """A metric that the model keeps has changed."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: dict[str, str]
    value: float
    replaces: bool
    """Whether ``value`` is the new one, or added."""


Replies = Taken | Asked | Replied | Dropped | Said | MetricChanged
Message = Load | Loaded | Forward | Forwarded | Failed | Execute | Executed | Answered | Replies


def without_inputs(request: InferRequest) -> InferRequest:
    """``request`` as messages carry it."""
    return msgspec.structs.replace(request, inputs={}, deadline=None, trace=None, step=None, held=None)


class Channel:
    """One end of the socket pair; one thread at a time may send, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._ahead = bytearray()
        """Of the messages after the last one received, what has come."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is gone."""
        data = self._encode(message)
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message:
        """The next message; blocks. Raises EOFError or OSError if the other end is gone."""
        data = self._ahead
        while len(data) < _LENGTH.size:
            data += self._read()
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        while len(data) < end:
            data += self._read()
        self._ahead = data[end:]
        return self._decode(memoryview(data)[_LENGTH.size : end])

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> bytes:
        data = self.socket.recv(_READ)
        if not data:
            raise EOFError
        return data
