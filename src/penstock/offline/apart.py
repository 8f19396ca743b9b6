"""Run models in a child process, because ONNX Runtime may end its process.

Some kernels divide an integer by the length of an axis. If the length is 0, SIGFPE ends the process, which no exception handler can
catch. Some graph rewrites abort the process. All calls share one child process, which the first call starts. If the child dies, the
next call starts a new one. The child ends with its parent.
"""

from __future__ import annotations

import atexit
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.model_store import keep_models
from penstock.offline.sessions import loaded
from penstock.tensor import Array

_KEPT_BYTES = 1 << 30
_MAX_BYTES = 256 << 20
_PATIENCE_S = 60.0
ENDED = "the model ended its process"
"""Start of the error message if running a model ended the child process."""


class Apart:
    """A child process that runs models. Several threads may share it; it runs one model at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def forward(self, artifact: Artifact, inputs: Mapping[str, Array], *, as_written: bool = True) -> dict[str, Array]:
        """The outputs of ``artifact`` on ``inputs``, computed on one thread. ``as_written`` means the same as in ``loaded``.

        Raises PenstockError if the model fails, ends its process, or runs longer than a minute.
        """
        with self._lock:
            found = self._ask((artifact, dict(inputs), as_written))
        if isinstance(found, str):
            raise PenstockError(found)
        return found

    def close(self) -> None:
        """End the child process. The next run of a model starts a new process."""
        with self._lock:
            self._end()

    def _ask(self, question: tuple[Artifact, dict[str, Array], bool]) -> dict[str, Array] | str:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(question, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
                self._end()
                return f"the model ran for more than {_PATIENCE_S:.0f} s"
            found: dict[str, Array] | str = pickle.load(process.stdout)  # noqa: S301 - from our own child
        except (EOFError, OSError, pickle.UnpicklingError):
            self._end()
            return f"{ENDED} with status {process.returncode}"
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.offline.apart"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None


apart = Apart()
atexit.register(apart.close)


def is_light(artifact: Artifact) -> bool:
    """True if the model is small enough to be loaded a second time, in the child process."""
    return artifact.size_bytes <= _MAX_BYTES


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Run each model that ``questions`` describes, and write its outputs to ``answers``, until ``questions`` ends."""
    with keep_models(_KEPT_BYTES):
        while True:
            try:
                question = pickle.load(questions)  # noqa: S301 - from our own parent
            except EOFError:
                return
            pickle.dump(_answer(*question), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _answer(artifact: Artifact, inputs: dict[str, Array], as_written: bool) -> Any:
    try:
        with loaded(artifact, as_written=as_written) as model:
            return model.forward(inputs)
    except PenstockError as error:
        return error.message


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
