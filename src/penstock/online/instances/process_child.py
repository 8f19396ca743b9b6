"""One child process with a model in it, as its parent sees it: started, spoken to, ended."""

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
    """A new process, not a fork, so that it inherits nothing of the server but what it is given.

    It runs the module ``worker``, inherits ``files`` (the model, the tensors in and out), and lives no longer than this process.
    ``wait`` belongs to one thread; of the others one at a time may ``send``, and one ``receive``.
    """

    def __init__(self, files: Sequence[int], worker: str = WORKER) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), lifeline, *files)
        # Until it can ignore them itself: what the terminal sends to all must not reach it before the parent has drained.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                # Safe path: no module is taken from the folder in which the server was started.
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

    def load(self, message: Load, take: Callable[[Message], None], timeout_s: float = 0.0) -> Loaded:
        """Have it load the model; ``take`` is given what it says meanwhile. Raises what the engine raises, PenstockError if the
        process ends instead, and TimeoutError after ``timeout_s``; 0 waits for ever."""
        end = time.monotonic() + timeout_s
        try:
            self.send(message)
            while not isinstance(answer := self.receive(_left(end) if timeout_s else 0), Loaded | Failed):
                take(answer)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            self.kill()  # if it has just closed its end
            how = _how(self._process.wait())
            raise PenstockError(f"the model's process ended with {how} while it loaded the model") from None
        if isinstance(answer, Failed):
            raise answer.error()
        return answer

    def send(self, message: Message) -> None:
        """Raises OSError if it has ended, and so has not been given ``message``."""
        with self._sending:
            self._channel.send(message)

    def receive(self, timeout_s: float) -> Message:
        """Its answer. Raises EOFError or OSError if it ended instead, TimeoutError after ``timeout_s``; 0 waits for ever."""
        with self._receiving:
            self._channel.socket.settimeout(timeout_s or None)
            return self._channel.receive()

    def wait(self) -> str:
        """Return when it has ended, how it did, with all that it took given back."""
        code = self._process.wait()
        # Callers stop waiting, even if a process that the model has started holds the other end.
        self._hang_up()
        with self._sending, self._receiving:
            self._channel.close()
        os.close(self._lifeline)
        return _how(code)

    def ask_to_end(self) -> None:
        """It ends after the call that it is at."""
        self._hang_up()

    def kill(self) -> None:
        self._process.kill()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # not connected any more
            self._channel.socket.shutdown(socket.SHUT_RDWR)


def _left(end: float) -> float:
    """Seconds until ``end``. Raises TimeoutError if there are none."""
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
