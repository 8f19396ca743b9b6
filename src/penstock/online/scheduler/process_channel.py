"""What a process instance and its child say to each other: messages over a socket pair, tensors not among them.

One message answers another, so there is never more than one on its way. Each is its length and its MessagePack form.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import PenstockError, revive
from penstock.online.scheduler.tensor_arena import Slot
from penstock.tensor import Signature

_LENGTH = struct.Struct("<I")
_READ = 1 << 16


class Load(msgspec.Struct, tag=True):
    """To the child: load the model, whose bytes are in the file that it inherited."""

    engine: str
    format: str
    digest: str
    path: str
    """Where the bytes came from; empty if from no file."""
    options: dict[str, Any]
    cores: tuple[int, ...]
    """Core ids to run on; empty: any."""


class Loaded(msgspec.Struct, tag=True):
    signature: Signature


class Run(msgspec.Struct, tag=True):
    inputs: list[Slot]


class Ran(msgspec.Struct, tag=True):
    outputs: list[Slot]


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


Message = Load | Loaded | Run | Ran | Failed


class Channel:
    """One end of the socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[memoryview], Message] = msgspec.msgpack.Decoder(Message).decode

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is gone."""
        data = self._encode(message)
        self.socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Message:
        """The next message; blocks. Raises EOFError or OSError if the other end is gone."""
        data = bytearray(self._read())
        while len(data) < _LENGTH.size:
            data += self._read()
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        while len(data) < end:
            data += self._read()
        return self._decode(memoryview(data)[_LENGTH.size : end])

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> bytes:
        data = self.socket.recv(_READ)
        if not data:
            raise EOFError
        return data
