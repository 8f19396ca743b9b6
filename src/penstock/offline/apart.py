"""Run models in a child process, because ONNX Runtime can crash its process.

Some kernels divide an integer by the length of an axis. If the length is 0, the signal SIGFPE kills the process; an exception handler
cannot catch it. Some graph rewrites abort the process. All calls share one child process, which the first call starts. If the child
dies, the next call starts a new one. The child ends with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, TypeVar

from penstock.artifact import Artifact
from penstock.engines.custom_ops import python_ops
from penstock.errors import PenstockError, Unavailable, printable
from penstock.offline.model_store import keep_models
from penstock.offline.sessions import loaded
from penstock.tensor import Array

T = TypeVar("T")

_KEPT_BYTES = 1 << 30
_MAX_BYTES = 256 << 20
_PATIENCE_S = 60.0
_READY = b"ready"
"""What the child process writes before it reads the first question."""
ENDED = "the model ended its process"
"""Start of the error message if running a model ended the child process."""


class NotStarted(Unavailable):
    """The child process could not start, which says nothing about the model."""


class Apart:
    """A child process that runs models. Several threads may share it; it runs one model at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def forward(self, artifact: Artifact, inputs: Mapping[str, Array], *, as_written: bool = True) -> dict[str, Array]:
        """Run ``artifact`` on ``inputs`` with one thread. ``as_written`` means the same as in ``loaded``.

        Raises PenstockError if the model fails, ends its process, or runs longer than a minute, and NotStarted.
        """
        return self.call(_forward, artifact, dict(inputs), as_written, patience_s=_PATIENCE_S)

    def call(self, function: Callable[..., T], *arguments: object, patience_s: float | None = None) -> T:
        """Call a function of a module in the child process, and return its result.

        A model with operators in Python runs in this process, which has them. Raises PenstockError if the function raises it, ends
        its process, or runs longer than ``patience_s``, and NotStarted if the child process does not start.
        """
        if any(isinstance(one, Artifact) and python_ops(one.data) for one in arguments):
            return function(*arguments)
        with self._lock:
            try:
                message, result = self._ask((_folder(), function, arguments), patience_s)
            except BaseException:
                self._end()  # Otherwise the next call would read the answer to this one.
                raise
        found: T = _checked(message, result)
        return found

    def close(self) -> None:
        """End the child process. The next run of a model starts a new process."""
        with self._lock:
            self._end()

    def _ask(self, question: tuple[object, ...], patience_s: float | None) -> tuple[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(question, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], patience_s)[0]:
                self._end()
                return f"the model ran for more than {patience_s:.0f} s", None
            found: tuple[str, Any] = pickle.load(process.stdout)  # noqa: S301 - from our own child
        except (EOFError, OSError, pickle.UnpicklingError):
            self._end()
            return f"{ENDED} with status {process.returncode}", None
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with tempfile.TemporaryFile() as told:
                self._process = subprocess.Popen(
                    # -P: import nothing from the working directory
                    [sys.executable, "-P", "-m", "penstock.offline.apart"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=told,
                    # no threads before a model has some, see ``forked``
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
                assert self._process.stdout is not None
                is_started = select.select([self._process.stdout], [], [], _PATIENCE_S)[0]
                if not is_started or self._process.stdout.read(len(_READY)) != _READY:
                    status = f"it ended with status {self._process.wait()}" if is_started else "it takes too long"
                    self._end()
                    told.seek(0)
                    raise _not_started(status, told.read())
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None


def _not_started(status: str, told: bytes) -> NotStarted:
    lines = told.decode(errors="replace").strip().splitlines()
    return NotStarted(
        f"the process that runs models apart could not start: {printable(lines[-1]) if lines else status}",
        "check PYTHONPATH, in which relative paths can lead elsewhere, and the limits of memory and processes (ulimit -a)",
    )


apart = Apart()
atexit.register(apart.close)


def is_light(artifact: Artifact) -> bool:
    """True if the model is small enough to be loaded a second time, in the child process."""
    return artifact.size_bytes <= _MAX_BYTES


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Call each function that ``questions`` names, and write its result to ``answers``, until ``questions`` ends.

    Relative paths mean the same as in the parent, because each question says in which folder the parent is.
    """
    with keep_models(_KEPT_BYTES):
        while True:
            try:
                folder, function, arguments = pickle.load(questions)  # noqa: S301 - from our own parent
            except EOFError:
                return
            if folder:
                os.chdir(folder)
            _answer(answers, function, arguments)


def _folder() -> str:
    """The current folder; empty if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def forked(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a copy of this process, and return its result. The copy then ends, so nothing that it loaded remains.

    Call this only from a process without threads, such as a child of ``Apart`` that has loaded no model: other threads do not exist in
    the copy, but their locks do. Raises PenstockError if the function raises it, or ends its process.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(writing, "wb") as answers:
                _answer(answers, function, arguments)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        pickled = answer.read()
    _, status = os.waitpid(child, 0)
    try:
        message, result = pickle.loads(pickled)  # noqa: S301 - from our own child
    except (EOFError, pickle.UnpicklingError):
        raise PenstockError(f"{ENDED} with status {os.waitstatus_to_exitcode(status)}") from None
    found: T = _checked(message, result)
    return found


def _checked(message: str, result: Any) -> Any:
    if message:
        raise PenstockError(message)
    return result


def _answer(answers: IO[bytes], function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Write the message of the error that ``function`` raises, and its result."""
    try:
        answer = "", function(*arguments)
    except PenstockError as error:
        answer = error.message, None
    pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
    answers.flush()


def _forward(artifact: Artifact, inputs: dict[str, Array], as_written: bool) -> dict[str, Array]:
    with loaded(artifact, as_written=as_written) as model:
        return model.forward(inputs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which decides
    with open(os.dup(1), "wb") as replies:
        replies.write(_READY)
        replies.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what engines print is no answer
            os.dup2(nowhere, stream)
        serve(sys.stdin.buffer, replies)
