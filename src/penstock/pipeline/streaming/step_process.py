"""A child process that runs steps, for steps whose Python code would hold the interpreter's lock.

The parent sends a step once, then calls. Both directions use pickle over a socket pair; the content of arrays, texts and files is in
shared memory of each direction. Parent and child trust each other: they run the same code as the same user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from penstock.errors import PenstockError, revive
from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.stage import Inputs

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_END_S = 5.0


class MessageMemory:
    """Buffers that one process writes and the other reads. The content is replaced by each message."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map: mmap.mmap | None = None

    def write(self, buffers: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Copy ``buffers`` into the memory. Returns the place and the size of each."""
        places, end = [], 0
        for buffer in buffers:
            places.append((end, buffer.nbytes))
            end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = self._mapped(end)
        for buffer, (start, size) in zip(buffers, places, strict=True):
            memory[start : start + size] = buffer
        return places

    def read(self, places: Sequence[tuple[int, int]]) -> list[bytearray]:
        """Copies of the buffers at ``places``."""
        memory = self._mapped(max((start + size for start, size in places), default=0))
        return [bytearray(memory[start : start + size]) for start, size in places]

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._map = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or size > len(self._map):
            whole = 1 << max(16, size.bit_length())
            if os.fstat(self.file).st_size < whole:
                os.ftruncate(self.file, whole)
            self._map = mmap.mmap(self.file, whole)
        return self._map


class StepChannel:
    """One end of the connection."""

    def __init__(self, end: socket.socket, out: MessageMemory, into: MessageMemory) -> None:
        self._socket = end
        self._out = out
        self._into = into

    def send(self, message: object) -> None:
        """Send ``message``. Raises OSError if the other end is closed, and the errors of pickle."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        places = self._out.write([buffer.raw() for buffer in buffers])
        head = pickle.dumps((data, places), protocol=5)
        self._socket.sendall(_LENGTH.pack(len(head)) + head)

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError if the other end is closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        data, places = pickle.loads(self._read(length))  # noqa: S301 - see the module's docstring
        return pickle.loads(data, buffers=self._into.read(places))  # noqa: S301 - see the module's docstring

    def close(self) -> None:
        """Close the connection and release the memory. Idempotent."""
        self._socket.close()
        self._out.close()
        self._into.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


class StepProcess:
    """The parent's side of a child process. One thread at a time may use it."""

    def __init__(self) -> None:
        """Start the child. It is ready when ``wait`` returns."""
        own, other = socket.socketpair()
        files = [os.memfd_create(f"penstock-{name}") for name in ("inputs", "outputs")]
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno()), *map(str, files)]
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
                command, pass_fds=(other.fileno(), *files), env={**os.environ, "PYTHONPATH": path}
            )
        self._channel = StepChannel(own, *map(MessageMemory, files))
        self._sent: list[object] = []

    def wait(self) -> None:
        """Wait until the child is ready. Raises EOFError or OSError if it has ended."""
        self._channel.receive()

    def run(self, step: object, items: Sequence[Inputs]) -> list[Told]:
        """The outcomes of ``step`` for ``items``. Raises EOFError or OSError if the child has ended, and the errors of pickle."""
        is_new = not any(one is step for one in self._sent)
        if is_new:
            self._sent.append(step)
        number = next(n for n, one in enumerate(self._sent) if one is step)
        self._channel.send((number, step if is_new else None, list(items)))
        return [revive(*one) if isinstance(one, tuple) else one for one in self._channel.receive()]

    def close(self) -> None:
        """End the child. Idempotent."""
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Serve calls until the parent closes the connection."""
    from penstock.pipeline.streaming.binding import run_step  # noqa: PLC0415 - the module imports this one

    end, into, out = map(int, sys.argv[1:])
    channel = StepChannel(socket.socket(fileno=end), MessageMemory(out), MessageMemory(into))
    steps: dict[int, Any] = {}
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        channel.send("ready")
        while True:
            number, step, items = channel.receive()
            if step is not None:
                steps[number] = step
            try:
                outcomes = run_step(steps[number], items)
            except Exception as error:  # noqa: BLE001 - reported to the parent
                outcomes = [PenstockError(f"the step failed: {type(error).__name__}: {error}")] * len(items)
            channel.send([_portable(told) for told in outcomes])


def _portable(told: Told) -> object:
    return (type(told).__name__, told.message, told.hint) if isinstance(told, PenstockError) else dict(told)


if __name__ == "__main__":
    main()
