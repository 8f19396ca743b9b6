"""One server in several processes. A supervisor starts the processes, restarts processes that die, and stops all processes.

All processes listen on the same ports (SO_REUSEPORT), and the operating system distributes the connections. Before it forks, the
supervisor loads the models that start no threads, so that all processes, including restarted processes, share the weights of these
models. Each process loads all other models itself.

The supervisor runs neither an event loop nor threads, because a fork would not copy them correctly.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PenstockError, Unavailable, revive
from penstock.online.restart import CALM_S, restart_delay_s

_log = logging.getLogger(__name__)

_READ = 65536
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class GroupMember(msgspec.Struct, frozen=True):
    """The position of one process in its group."""

    index: int
    folder: Path
    """The folder that contains the socket of every process."""
    lifeline: int
    """File descriptor that becomes readable when the supervisor dies."""
    is_replacement: bool
    """True if this process replaces a process that has died while the other processes were running."""


class Message(msgspec.Struct):
    """A message from a process to its supervisor. The message reports that the process is ready, or why the process has failed."""

    ready: dict[str, Any] | None = None
    error: tuple[str, str, str] | None = None
    """Kind, message, hint."""


Serve = Callable[[GroupMember, Callable[[dict[str, Any]], None]], None]
"""Runs one server process until SIGTERM. Calls the given function once the process is ready. Raises PenstockError."""


class _Process(msgspec.Struct, eq=False):
    index: int
    pid: int
    pipe: int
    received: bytes = b""
    is_ready: bool = False


class Supervisor:
    """Runs ``serve`` in ``count`` processes, and restarts processes that die, until a signal arrives."""

    def __init__(self, count: int, serve: Serve, on_ready: Callable[[dict[str, Any]], None]) -> None:
        self._count = count
        self._serve = serve
        self._on_ready = on_ready
        self._processes: dict[int, _Process] = {}
        self._deaths: dict[int, list[float]] = {}
        self._due: dict[int, float] = {}
        """The time to restart each process that has died, by index."""
        self._selector = selectors.DefaultSelector()
        self._announced = False
        self._stops = 0
        self._failure: PenstockError | None = None
        self._exit = 0

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, and return when all processes have ended.

        Raises the error of a process that failed to start, and Unavailable if a process did not end cleanly.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        # The operating system closes the pipe when the supervisor dies for any reason, and the processes then exit.
        self._lifeline, self._lifeline_end = os.pipe()
        before = self._catch_signals()
        try:
            for index in range(self._count):
                if not self._stops:
                    self._start(index)
            while self._processes or (self._due and not self._stops):
                self._turn()
        finally:
            for process in self._processes.values():
                os.kill(process.pid, signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._failure is not None:
            raise self._failure
        if self._exit:
            raise Unavailable(f"a server process ended with code {self._exit}", "see its messages above")

    def _catch_signals(self) -> dict[int, Any]:
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        return before

    def _turn(self) -> None:
        """Wait for one event and handle it."""
        now = time.monotonic()
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start(index)
        timeout = min(self._due.values(), default=now + 3600) - now
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.fileobj is self._wake:
                for number in self._wake.recv(4096):
                    if number != signal.SIGCHLD:
                        self._stop()
            else:
                self._read(key.data)

    def _stop(self) -> None:
        """Forward a termination signal. A second signal ends the processes immediately."""
        self._stops += 1
        self._due.clear()
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGTERM)

    def _start(self, index: int) -> None:
        try:
            pid, pipe = self._fork(index)
        except OSError as error:
            self._miss(index, f"could not be started ({error.strerror})")
            return
        process = self._processes[index] = _Process(index, pid, pipe)
        self._selector.register(pipe, selectors.EVENT_READ, process)

    def _fork(self, index: int) -> tuple[int, int]:
        """Start a process. Returns its id, and the pipe from which to read its messages. Raises OSError."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # The child's signals stay pending until it has installed its own handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                self._be(index, write, mask)
        except OSError:
            os.close(read)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(write)
        return pid, read

    def _be(self, index: int, pipe: int, mask: set[signal.Signals | int]) -> None:
        """Run as a server process, then exit. ``mask`` contains the signals to block."""
        code = 1
        try:
            # The child gets its own process group, so that Ctrl-C reaches only the supervisor, which forwards it.
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(self._lifeline_end)
            for process in self._processes.values():
                os.close(process.pipe)
            self._selector.close()
            member = GroupMember(index, self._folder, self._lifeline, self._announced)
            self._serve(member, lambda ready: _send(pipe, Message(ready=ready)))
            code = 0
        except PenstockError as error:
            _send(pipe, Message(error=(type(error).__name__, error.message, error.hint)))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - the supervisor's own code must not continue in this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _read(self, process: _Process) -> None:
        """Read the messages of a process, or detect that it has ended."""
        data = os.read(process.pipe, _READ)
        process.received += data
        while b"\n" in process.received:
            line, _, process.received = process.received.partition(b"\n")
            self._hear(process, msgspec.json.decode(line, type=Message))
        if not data:
            self._bury(process)

    def _hear(self, process: _Process, message: Message) -> None:
        if message.error is not None:
            error = revive(*message.error)
            if not self._announced:
                self._failure = self._failure or error
            _log.error("process %d: %s", process.index, error)
        elif message.ready is not None:
            process.is_ready = True
            if not (self._announced or self._stops) and all(one.is_ready for one in self._processes.values()):
                self._announced = True
                self._on_ready(message.ready)

    def _bury(self, process: _Process) -> None:
        """Reap a process that has ended, and schedule its restart unless the server is stopping."""
        self._selector.unregister(process.pipe)
        os.close(process.pipe)
        _, status = os.waitpid(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        del self._processes[process.index]
        if self._stops:
            if code != -signal.SIGTERM or process.is_ready:  # otherwise, SIGTERM preceded its handler
                self._exit = self._exit or abs(code)
        else:
            self._miss(process.index, f"ended with signal {-code}" if code < 0 else f"ended with code {code}")

    def _miss(self, index: int, how: str) -> None:
        """Schedule the restart of a missing process. During start-up, let the server fail instead."""
        if not self._announced:
            self._failure = self._failure or Unavailable(f"a server process {how} before it was ready")
            self._stop()
            return
        now = time.monotonic()
        deaths = self._deaths.setdefault(index, [])
        deaths[:] = [moment for moment in deaths if now - moment < CALM_S] + [now]
        delay = restart_delay_s(deaths, now)
        _log.warning("process %d %s; it restarts in %g s", index, how, delay)
        self._due[index] = now + delay


def reserve(host: str, port: int) -> socket.socket:
    """A socket that reserves ``port`` on ``host``, so that several processes can listen on it; 0 selects a free port.

    Raises OSError, also if another server listens on the port and would share it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held


def _send(pipe: int, message: Message) -> None:
    os.write(pipe, msgspec.json.encode(message) + b"\n")
