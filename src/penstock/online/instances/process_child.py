"""The parent's side of a child process with a model: starts the child, exchanges messages with it, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import PenstockError
from penstock.online.instances.process_channel import Channel, Failed, Load, Loaded, Message

WORKER = "penstock.online.instances.process_worker"
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class ProcessChild:
    """A child process. It is a new interpreter, not a fork, and inherits only ``files``: the descriptors of the model and of the
    arenas for inputs and outputs.

    The child runs the module ``worker`` and ends with this process. Only one thread may call ``wait``. At any time, only one thread
    may ``send``, and only one may ``receive``.
    """

    def __init__(self, files: Sequence[int], worker: str = WORKER) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), lifeline, *files)
        # A terminal also sends its signals to the child, but the child must live until the parent has drained. The signals are
        # therefore blocked until the child ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a module of Penstock
                # -P: do not import modules from the current folder.
                [sys.executable, "-P", "-m", worker, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=inherited,
            )
        except OSError as error:
            ours.close()
            os.close(self._lifeline)
            raise PenstockError(f"cannot start a process for the model: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            os.close(lifeline)
        self._channel = Channel(ours)
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def used_s(self) -> float | None:
        """CPU seconds of the process without its own children. None if the process has ended, or if the system is not Linux."""
        try:
            # The clock that clock_getcpuclockid(3) returns.
            return time.clock_gettime(~self.pid << 3 | 2)
        except OSError:
            return None

    def load(self, message: Load, take: Callable[[Message], None], timeout_s: float = 0.0) -> Loaded:
        """Load the model, and call ``take`` with the messages that arrive during the load.

        Raises the engine's error, PenstockError if the process ends, and TimeoutError after ``timeout_s`` seconds (0: no limit).
        """
        end = time.monotonic() + timeout_s
        left_s = 0.0
        try:
            self.send(message)
            while True:
                if timeout_s and (left_s := end - time.monotonic()) <= 0:
                    raise TimeoutError
                if isinstance(answer := self.receive(left_s), Loaded | Failed):
                    break
                take(answer)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self.kill()  # the child may have closed only its end of the socket
            how = _how(self._process.wait())
            raise PenstockError(f"the model's process ended with {how} while it loaded the model") from None
        if isinstance(answer, Failed):
            raise answer.error()
        return answer

    def send(self, message: Message) -> None:
        """Send ``message``. Raises OSError if the child has ended."""
        with self._sending:
            self._channel.send(message)

    def receive(self, timeout_s: float) -> Message:
        """Wait for a message. Raises EOFError or OSError if the child ends, and TimeoutError after ``timeout_s`` (0: no limit)."""
        with self._receiving:
            self._channel.socket.settimeout(timeout_s or None)
            return self._channel.receive()

    def wait(self) -> str:
        """Wait until the child has ended, free its resources, and return how it ended."""
        code = self._process.wait()
        # Wakes waiting callers, even if a process that the model has started keeps the other end of the socket open.
        self.ask_to_end()
        with self._sending, self._receiving:
            self._channel.close()
        os.close(self._lifeline)
        return _how(code)

    def ask_to_end(self) -> None:
        """Tell the child to end after its current call."""
        with contextlib.suppress(OSError):  # not connected any more
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self._process.kill()


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
