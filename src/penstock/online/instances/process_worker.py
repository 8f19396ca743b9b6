"""The child process of a process instance. It loads one model, answers one call at a time, and ends with its parent.

Its arguments are inherited file descriptors: the socket, the lifeline, the model, and the arenas for inputs and outputs.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel
from penstock.engines.custom_ops import run_file
from penstock.engines.registry import get_engine
from penstock.online.instances.process_channel import Channel, Failed, Forward, Forwarded, Load, Loaded
from penstock.online.instances.tensor_arena import TensorArena

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def serve(
    arguments: Sequence[str], answer: Callable[[Channel, Load, Callable[[], Artifact], Sequence[TensorArena]], None]
) -> None:
    """Call ``answer`` with the channel, the first message, a function that reads the model, and the arenas."""
    end, lifeline, model_file, *arenas = descriptors = [int(argument) for argument in arguments]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    _end_with(lifeline)
    # A terminal or supervisor signals all processes, but the parent still needs this one to answer the accepted requests.
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=end))
    with suppress(EOFError, OSError):  # the parent has closed the connection
        load = channel.receive()
        assert isinstance(load, Load)
        answer(channel, load, lambda: _read_artifact(load, model_file), [TensorArena(file) for file in arenas])


def _answer_calls(
    channel: Channel, load: Load, read_artifact: Callable[[], Artifact], arenas: Sequence[TensorArena]
) -> None:
    try:
        for file in load.operators:
            run_file(Path(file))
        model = get_engine(load.engine).load(read_artifact(), load.options)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        channel.send(Failed.of(error))
        return
    facts = model.optional_inputs, model.keeps_state, model.unranked, dict(model.left_out)
    channel.send(Loaded(model.signature, *facts))
    inputs, outputs = arenas
    while True:
        message = channel.receive()
        assert isinstance(message, Forward)
        channel.send(run(model, message, inputs, outputs))


def run(model: LoadedModel, message: Forward, inputs: TensorArena, outputs: TensorArena) -> Forwarded | Failed:
    """Call the model once and write its outputs to ``outputs``."""
    try:
        return Forwarded(outputs.write(model.forward(inputs.view(message.inputs))))
    except Exception as error:  # noqa: BLE001 - an engine's bug must fail its batch, not end the process
        return Failed.of(error)


def _read_artifact(load: Load, model_file: int) -> Artifact:
    """Read the model from ``model_file`` and close it. Restricts the process to the cores of ``load``."""
    if load.cores:
        # Set this before the engine starts its threads, because they inherit the restriction.
        os.sched_setaffinity(0, load.cores)
    data = b""
    if os.fstat(model_file).st_size:
        with mmap.mmap(model_file, 0, prot=mmap.PROT_READ) as mapped:
            data = mapped[:]
    os.close(model_file)
    path = Path(load.path) if load.path else None
    contents, position = {}, len(data)
    for entry in () if path else reversed(load.beside):
        contents[entry.path] = data[position - entry.size_bytes : position]
        position -= entry.size_bytes
    return Artifact(
        data[:position],
        Format(load.format),
        load.digest,
        path,
        name=load.name,
        beside=load.beside,
        contents=contents,
    )


def _end_with(lifeline: int) -> None:
    """Have the kernel end this process when the parent's end of the pipe ``lifeline`` is closed.

    The signal must end the process by its default action. A Python handler could not run while a model that hangs holds the
    interpreter lock. PR_SET_PDEATHSIG is not suitable, because it reports the end of the parent's thread, not of the parent.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()  # the parent ended before O_ASYNC was set


if __name__ == "__main__":
    serve(sys.argv[1:], _answer_calls)
