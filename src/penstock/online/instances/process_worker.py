"""The child of a process instance: loads one model, answers one call at a time, and ends with its parent.

Started by ``process_instance`` with the numbers of the descriptors that it inherits: socket, lifeline, model, and the tensors
in and out.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.online.instances.process_channel import Channel, Failed, Forward, Forwarded, Load, Loaded
from penstock.online.instances.tensor_arena import TensorArena

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent closes the socket."""
    end, model_file, inputs, outputs = begin(arguments)
    channel = Channel(socket.socket(fileno=end))
    try:
        message = channel.receive()
        assert isinstance(message, Load)
        try:
            model = _load(message, model_file)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            channel.send(failure(error))
            return
        del message
        channel.send(Loaded(model.signature, model.optional_inputs))
        _answer(model, channel, TensorArena(inputs), TensorArena(outputs))
    except (EOFError, OSError):
        pass  # the parent needs it no more


def _answer(model: LoadedModel, channel: Channel, inputs: TensorArena, outputs: TensorArena) -> None:
    while True:
        message = channel.receive()
        assert isinstance(message, Forward)
        channel.send(run(model, message, inputs, outputs))


def run(model: LoadedModel, message: Forward, inputs: TensorArena, outputs: TensorArena) -> Forwarded | Failed:
    """One call; its outputs are left in ``outputs``."""
    try:
        return Forwarded(outputs.write(model.forward(inputs.view(message.inputs))))
    except Exception as error:  # noqa: BLE001 - an engine's bug costs its batch, not the process
        return failure(error)


def begin(arguments: Sequence[str]) -> list[int]:
    """Make this process end with its parent, and only then. Returns the inherited descriptors without the lifeline."""
    end, lifeline, *files = descriptors = [int(argument) for argument in arguments]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    _end_with(lifeline)
    _leave_signals_to_the_parent()
    faulthandler.enable()
    return [end, *files]


def failure(error: Exception) -> Failed:
    """``error`` as a message to the parent."""
    if isinstance(error, PenstockError):
        return Failed.of(error)
    _log.error("the model failed", exc_info=error)
    return Failed(PenstockError.__name__, f"the model failed: {type(error).__name__}", "")


def _load(message: Load, model_file: int) -> LoadedModel:
    return get_engine(message.engine).load(read_artifact(message, model_file), message.options)


def read_artifact(message: Load, model_file: int) -> Artifact:
    """What is to be loaded, from ``model_file``, which is closed; from now on this process runs on its own cores."""
    if message.cores:
        # Before the engine starts its threads, which inherit it.
        os.sched_setaffinity(0, message.cores)
    data = b""
    if os.fstat(model_file).st_size:
        with mmap.mmap(model_file, 0, prot=mmap.PROT_READ) as mapped:
            data = mapped[:]
    os.close(model_file)
    path = Path(message.path) if message.path else None
    contents, position = {}, len(data)
    for entry in () if path else reversed(message.beside):
        contents[entry.path] = data[position - entry.size_bytes : position]
        position -= entry.size_bytes
    return Artifact(
        data[:position],
        Format(message.format),
        message.digest,
        path,
        name=message.name,
        beside=message.beside,
        contents=contents,
    )


def _end_with(lifeline: int) -> None:
    """Have the system end this process when the parent's end of the pipe ``lifeline`` is closed.

    By a signal whose default action that is, since a model that hangs may hold the interpreter, too. PR_SET_PDEATHSIG would not do: it
    tells of the end of the thread that started this process, not of its process.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()  # it had been closed before


def _leave_signals_to_the_parent() -> None:
    """What the terminal or a supervisor sends to all processes: the parent still needs this one to answer what it has accepted."""
    stopping = (signal.SIGINT, signal.SIGTERM)
    for number in stopping:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)


if __name__ == "__main__":
    main(sys.argv[1:])
