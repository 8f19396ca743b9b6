"""``Process``: a process group that answers binary questions, with limits of time and memory. Nothing of it remains when it ends."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from penstock.errors import DeadlineExceeded, InvalidData, PenstockError, ResourceExhausted, bounded
from penstock.offline.convert.worker.wire import MAX_HEADER_BYTES, PREFIX
from penstock.resources import CPU_WITHOUT, usable_memory

_PACKAGE = Path(__file__).parents[3]
_LOG_BYTES = 16 << 10
_PIPE_BYTES = 1 << 20
_ENDING_S = 2.0
"""Time between the end of the answers and the end of the process."""
# An isolated environment has no Penstock. The finder gives it this one, and nothing else of the parent's environment. Some
# packages start threads when they are imported, and a process with threads cannot be confined, so that comes first.
_START = """
import importlib.util, sys
class Penstock:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "penstock":
            return importlib.util.spec_from_file_location(
                name, {init!r}, submodule_search_locations=[{package!r}])
sys.meta_path.insert(0, Penstock)
from penstock.offline.convert.worker.confine import confine, end_with
end_with(int(sys.argv[1]))
notes = confine(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
from {program} import main
main(notes)
"""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", CPU_WITHOUT)
_FORCED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "agg",
    "ORT_DISABLE_TELEMETRY": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "1",
}


class Limits(msgspec.Struct, frozen=True):
    """What one source may use. 0 stands for what the machine has."""

    memory_bytes: int = 0
    call_s: float = 1800.0
    """Time for one call, such as an export."""
    answer_bytes: int = 0
    """Size of the arrays of one answer."""
    file_bytes: int = 64 << 30
    """Size of one written file."""


UNLIMITED = Limits()
"""The limits of a source that may use the whole machine."""


class Process:
    """A process in its own group that can write only below ``folder``, its home. One thread may use it at a time."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int, folder: Path, limits: Limits) -> None:
        self._popen, self._limits = popen, limits
        self.folder = folder
        self._questions, self._answers, self._log = map(_nonblocking, (popen.stdin, popen.stdout, popen.stderr))
        self._printed: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._can_print = True
        self._deadline = 0.0
        self._finalizer = weakref.finalize(self, _end, popen, lifeline, folder)  # also runs when the interpreter exits

    @classmethod
    def start(cls, program: str, python: Path | None, limits: Limits, reads: Sequence[Path] = ()) -> Process:
        """Start ``main`` of the module ``program``, with the interpreter ``python`` of another environment, or with this one.

        ``reads`` are the files that it will read.
        """
        memory = limits.memory_bytes or usable_memory() or 1 << 40
        limits = msgspec.structs.replace(limits, memory_bytes=memory, answer_bytes=limits.answer_bytes or memory // 2)
        script = _START.format(init=str(_PACKAGE / "__init__.py"), package=str(_PACKAGE), program=program)
        with contextlib.ExitStack() as undo:
            folder, kept, lifeline = _opened(undo)
            popen = subprocess.Popen(  # noqa: S603 - Penstock's own program
                [python or sys.executable, "-I" if python else "-P", "-c", script]
                + [str(number) for number in (kept, memory, limits.file_bytes)]
                + [str(path) for path in reads],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(folder, isolated=python is not None),
                cwd=folder,
                pass_fds=(kept,),
                start_new_session=True,
                bufsize=0,
                pipesize=_PIPE_BYTES,
            )
            undo.pop_all()
        os.close(kept)
        return cls(popen, lifeline, folder, limits)

    def ask(self, question: Sequence[bytes | memoryview]) -> tuple[bytearray, bytearray]:
        """Send the parts of a frame. Returns the header and the body of the answer.

        Raises DeadlineExceeded, InvalidData if the answer is too long, ResourceExhausted if the process needs too much memory,
        PenstockError if it ends. After an error, the process can only be ended.
        """
        self._deadline = time.monotonic() + self._limits.call_s
        self._unsent.extend(memoryview(part) for part in question if len(part))
        header_bytes, body_bytes = PREFIX.unpack(self._receive(PREFIX.size))
        if header_bytes > MAX_HEADER_BYTES or body_bytes > self._limits.answer_bytes:
            raise InvalidData(f"an answer of {header_bytes} + {body_bytes} bytes exceeds the limit")
        return self._receive(header_bytes), self._receive(body_bytes)

    def end(self) -> None:
        """Kill the process group and remove its folder. Idempotent."""
        self._finalizer()

    def _receive(self, size: int) -> bytearray:
        """The next ``size`` bytes of the answer. Sends the rest of the question first, and collects what the process prints."""
        found, position = bytearray(size), 0
        while position < size or self._unsent:
            ready = self._ready()
            if self._log in ready:
                self._collect()
            if self._questions in ready:
                self._send()
            if self._answers in ready:
                received = os.readv(self._answers, [memoryview(found)[position:]]) if position < size else 0
                if not received:
                    raise self._ended()
                position += received
        return found

    def _ready(self) -> set[int]:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._can_print:
            poll.register(self._log, select.POLLIN)
        if self._unsent:
            poll.register(self._questions, select.POLLOUT)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the source's framework took more than {self._limits.call_s:g} s", self._told())
        return {pipe for pipe, _ in poll.poll(left * 1000)}

    def _send(self) -> None:
        part = self._unsent.popleft()
        try:
            sent = os.write(self._questions, part)
        except BrokenPipeError:
            raise self._ended() from None
        if sent < len(part):
            self._unsent.appendleft(part[sent:])

    def _collect(self) -> bool:
        """Take some of what the process printed, and keep the last part of all. Returns False if there is nothing."""
        try:
            self._printed.append(os.read(self._log, _PIPE_BYTES)[-_LOG_BYTES:])
        except BlockingIOError:
            return False
        while sum(map(len, self._printed)) - len(self._printed[0]) > _LOG_BYTES:
            self._printed.popleft()
        self._can_print = bool(self._printed[-1])
        return self._can_print

    def _told(self) -> str:
        lines = b"".join(self._printed).decode("utf-8", "replace").splitlines()
        tail = bounded("\n".join([line for line in lines if line.strip()][-8:]), 1200)
        return f"it printed last: {tail}" if tail else ""

    def _ended(self) -> PenstockError:
        """The error that says how the process ended."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self._popen.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(_ENDING_S * 1000)
            os.close(pidfd)
        _kill(self._popen)
        for _ in range(16):  # a process that left the group could print forever
            if not self._collect():
                break
        told, status = self._told(), self._popen.returncode
        if any(sign in told for sign in ("MemoryError", "bad_alloc", "allocate memory")):
            limit = f"{self._limits.memory_bytes / (1 << 30):.3g} GiB"
            return ResourceExhausted(f"the source needs more memory than {limit}", "use a machine with more memory")
        name = f"status {status}" if status >= 0 else signal.Signals(-status).name
        return PenstockError(f"the process of the source's framework ended with {name}", told)


def _opened(undo: contextlib.ExitStack) -> tuple[Path, int, int]:
    """A folder and the ends of a pipe, which ``undo`` removes and closes. An interrupt comes before or after, so that none is lost."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        folder = Path(tempfile.mkdtemp(prefix="penstock-convert-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        ends = os.pipe()
        for end in ends:
            undo.callback(os.close, end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return folder, *ends


def _environment(folder: Path, *, isolated: bool) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    if not isolated:  # the same packages as here, although the home folder is another
        kept["PYTHONUSERBASE"] = site.getuserbase()
        kept["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    return kept | _FORCED_VARIABLES | {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}


def _nonblocking(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """Kill the group, then reap its leader: in this order, because another group may have its number after that."""
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def _end(popen: subprocess.Popen[bytes], lifeline: int, folder: Path) -> None:
    _kill(popen)
    with popen:
        pass
    os.close(lifeline)
    shutil.rmtree(folder, ignore_errors=True)
