"""The messages between a process instance and its child process. They are sent over a socket pair. Tensors are in shared memory.

A message is sent as its length followed by its MessagePack form. With most engines, each message has exactly one reply. With a Python
model, parent and child may send at any time, because the model may call other models while it executes, and may send responses later::

    parent                          child
    Execute   ──────────────────▶             requests; their inputs are in the input arena
              ◀──────────────────   Answered  an answer of a decoupled model, or a check whether the client has cancelled
    Taken     ──────────────────▶             the tensors have been copied, so their arena is free
              ◀──────────────────   Asked     a request to another model
    Taken, Replied … ───────────▶             the other model's answers; the child acknowledges each with Taken
              ◀──────────────────   Executed  the outcomes; outputs are in the output arena
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from penstock.artifact import FileEntry
from penstock.errors import PenstockError, revive
from penstock.online.instances.tensor_arena import TensorArena, TensorSlot
from penstock.request import InferRequest
from penstock.tensor import Array, Signature, TensorSpec

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_READ = 1 << 16

Stages = dict[str, tuple[int, int]]
"""Count and total nanoseconds of each stage since the previous message, by stage name."""


class Load(msgspec.Struct, tag=True):
    """Request to load a model. The model's files are in memory that the child inherits."""

    engine: str
    format: str
    digest: str
    path: str
    """Path of the model's file; empty if the model is not in a file."""
    options: dict[str, Any]
    cores: tuple[int, ...]
    """Core ids to run on; empty means any."""
    name: str = ""
    """``Artifact.name``."""
    beside: tuple[FileEntry, ...] = ()
    """``Artifact.beside``, the model's other files. If ``path`` is empty, their contents follow the bytes of the main file."""
    operators: tuple[str, ...] = ()
    """The user's files with operators in Python."""


class Loaded(msgspec.Struct, tag=True):
    signature: Signature
    optional_inputs: tuple[TensorSpec, ...] = ()
    """Inputs that have a default value in the model. The signature does not include them."""
    keeps_state: bool = False
    unranked: frozenset[str] = frozenset()
    left_out: dict[str, str] = {}
    """See ``LoadedModel``."""
    decoupled: bool = False
    """``decoupled`` and ``max_batch`` are set only for Python models. See ``RequestModel``."""
    max_batch: int | None = None


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
    def of(cls, error: Exception) -> Failed:
        """Convert ``error``. For an unexpected error, the parent receives only the type. The traceback is logged."""
        if not isinstance(error, PenstockError):
            _log.error("the model failed", exc_info=error)
            error = PenstockError(f"the model failed: {type(error).__name__}")
        return cls(type(error).__name__, error.message, error.hint)

    def error(self) -> PenstockError:
        return revive(self.kind, self.message, self.hint)


class Execute(msgspec.Struct, tag=True):
    first: int
    """Number of the first request. The other requests have consecutive numbers."""
    requests: list[InferRequest]
    """The requests without their inputs."""
    inputs: list[list[TensorSlot]]


OutcomeSlots = list[TensorSlot] | Failed | None
"""The outcome of a request: outputs or an error. None if the request has no outcome yet."""


class Executed(msgspec.Struct, tag=True):
    outcomes: list[OutcomeSlots]
    stages: Stages


class Answered(msgspec.Struct, tag=True):
    number: int
    outcome: OutcomeSlots
    final: bool
    stages: Stages


class Taken(msgspec.Struct, tag=True):
    """Acknowledges a message: its tensors have been copied, so the arena can be reused."""

    wanted: bool = True
    """False once the client has cancelled the request."""


class Asked(msgspec.Struct, tag=True):
    number: int
    request: InferRequest
    """The request without its inputs."""
    inputs: list[TensorSlot]
    decoupled: bool


class Replied(msgspec.Struct, tag=True):
    number: int
    """Number of the ``Asked`` message."""
    outcome: OutcomeSlots
    final: bool
    model: tuple[str, str]
    """Name and version of the model that answered."""


class Dropped(msgspec.Struct, tag=True):
    """Sent when the model has cancelled the call with this ``number``."""

    number: int


class Said(msgspec.Struct, tag=True):
    """A line for the server's log."""

    level: int
    text: str


class MetricChanged(msgspec.Struct, tag=True):
    """Sent when a metric of the model has changed."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: dict[str, str]
    value: float
    replaces: bool
    """True to replace the metric's value with ``value``; False to add ``value``."""


Replies = Taken | Asked | Replied | Dropped | Said | MetricChanged
Message = Load | Loaded | Forward | Forwarded | Failed | Execute | Executed | Answered | Replies


def without_inputs(request: InferRequest) -> InferRequest:
    """``request`` without the inputs and the fields that messages do not contain."""
    return msgspec.structs.replace(request, inputs={}, deadline=None, trace=None, step=None, held=None, lease=None)


def write_outcome(outcome: Mapping[str, Array] | PenstockError | None, arena: TensorArena) -> OutcomeSlots:
    """Convert the outcome of a request to its form in a message. Outputs replace the content of ``arena``."""
    if isinstance(outcome, PenstockError):
        return Failed.of(outcome)
    return None if outcome is None else arena.write(outcome)


def read_outcome(outcome: OutcomeSlots, arena: TensorArena) -> dict[str, Array] | PenstockError | None:
    """Reverse ``write_outcome``. The returned outputs are copies."""
    if isinstance(outcome, Failed):
        return outcome.error()
    return None if outcome is None else arena.copy(outcome)


class Channel:
    """One end of the socket pair between the server and a model's process.

    At any time, at most one thread may send and at most one thread may receive.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._ahead = bytearray()
        """Bytes that have arrived after the last complete message."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode

    def send(self, message: Message) -> None:
        """Send ``message``. Raises OSError if the other end is closed."""
        data = self._encode(message)
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message:
        """Wait for the next message. Raises EOFError or OSError if the other end is closed."""
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
