"""Communication between the processes of one server. Each process answers the control planes of the other processes on a Unix socket.

A message consists of its length (4 bytes, little-endian) and MessagePack data: ``[what, arguments]`` for a request, ``[error,
result]`` for a response. The sockets are in a folder that only the server's user can enter.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.errors import PenstockError, ResourceExhausted, Unavailable, revive
from penstock.storage.atomic import write_whole

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20
_PATIENCE_S = 5.0
_LOCK_PATIENCE_S = 15.0
"""Maximum seconds to wait for a lock. The holder may have to wait for a hanging process twice: to make a change and to undo it."""
_LOCK_PAUSE_S = 0.005

_BROKEN = (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, msgspec.MsgspecError, RecursionError)
"""Errors caused by another process that dies, hangs or sends an invalid message."""

_Form = TypeVar("_Form")

Answerer = Callable[[str, list[Any]], Awaitable[Any]]
"""Answers a request ``(what, arguments)`` of another process. Returns plain data or msgspec structs."""


class _Question(NamedTuple):
    what: str
    arguments: list[Any]


class _Outcome(NamedTuple):
    error: tuple[str, str, str] | None
    """Kind, message and hint."""
    result: Any


class ProcessGroup:
    """The other processes of this server. This base class is used by a server with only one process."""

    async def serve(self, answer: Answerer) -> None:
        """Start answering the other processes."""

    async def ask(self, what: str, *arguments: Any, patient: bool = False) -> list[Any]:
        """Send the request ``what`` to all other processes, and return their responses. If a process responds with an error,
        raises this error.

        Skips processes that are starting or shutting down. Unless ``patient``, also skips processes that do not answer in time.
        """
        return []

    def keep(self, what: Any) -> None:
        """Store data for the process that replaces this process. If this process dies, the other processes use the data."""

    def inherited(self) -> Any:
        """The data that the predecessor of this process has stored, or None."""
        return None

    def kept_by_absent(self) -> list[Any]:
        """The data stored by processes that did not answer the last request."""
        return []

    def exclusive(self, what: str = "", *, patient: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold the server-wide lock ``what``, so that changes reach all processes in the same order. The lock is released if the
        process dies.

        Raises Unavailable if acquiring the lock takes too long, unless ``patient``.
        """
        return nullcontext()

    async def close(self, is_orphan: bool = False) -> None:
        """Stop answering. If the supervisor has died, the last process removes the group's folder."""


class SocketGroup(ProcessGroup):
    """The group from the view of process ``index``. The sockets of all processes are in ``folder``. Used only on the event loop."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder = folder
        self._path = folder / f"{index}.sock"
        self._server: asyncio.Server | None = None
        self._answered: set[Path] = set()
        """Sockets of the processes that answered the last request."""
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks within this process, by name."""

    async def serve(self, answer: Answerer) -> None:
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(partial(_handle, answer), self._path)

    async def ask(self, what: str, *arguments: Any, patient: bool = False) -> list[Any]:
        others = [path for path in self._folder.glob("*.sock") if path != self._path]
        patience_s = None if patient else _PATIENCE_S
        outcomes = await asyncio.gather(*(_ask(path, what, arguments, patience_s) for path in others))
        self._answered = {path for path, outcome in zip(others, outcomes, strict=True) if outcome is not None}
        answered = [outcome for outcome in outcomes if outcome is not None]
        for outcome in answered:
            if outcome.error is not None:
                raise revive(*outcome.error)
        return [outcome.result for outcome in answered]

    def keep(self, what: Any) -> None:
        with suppress(ResourceExhausted):  # the disk is full: old data is better than none
            write_whole(_kept(self._path), msgspec.msgpack.encode(what))

    def inherited(self) -> Any:
        return _read_kept(self._path)

    def kept_by_absent(self) -> list[Any]:
        known = {kept.with_suffix(".sock") for kept in self._folder.glob("*.kept")}
        absent = known - self._answered - {self._path}
        return [kept for path in absent if (kept := _read_kept(path)) is not None]

    @asynccontextmanager
    async def exclusive(self, what: str = "", *, patient: bool = False) -> AsyncIterator[None]:
        """Acquire the lock of this process first, then the lock that the processes share."""
        async with self._turns[what]:
            lock = await self._lock(self._folder / f"{what}.lock" if what else self._folder, patient)
            try:
                yield
            finally:
                os.close(lock)  # also releases the lock

    async def close(self, is_orphan: bool = False) -> None:
        """Close the socket and remove its file."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        if is_orphan:
            _kept(self._path).unlink(missing_ok=True)
            for lock in self._folder.glob("*.lock"):
                lock.unlink(missing_ok=True)
            with suppress(OSError):  # other orphans are still running
                self._folder.rmdir()

    async def _lock(self, path: Path, patient: bool) -> int:
        """Wait for the lock on ``path``. Returns its descriptor, which the caller must close. Raises Unavailable."""
        flags = os.O_RDONLY | (os.O_DIRECTORY if path == self._folder else os.O_CREAT)
        lock = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            end = time.monotonic() + _LOCK_PATIENCE_S
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return lock
                if time.monotonic() > end and not patient:
                    raise Unavailable("another process of the server is busy", "try again")
                await asyncio.sleep(_LOCK_PAUSE_S)
        except BaseException:
            os.close(lock)
            raise


async def _handle(answer: Answerer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the request of another process on one connection."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            what, arguments = await _receive(reader, _Question)
        writer.write(_frame(await _outcome(answer, what, arguments)))
        await writer.drain()
    except _BROKEN as error:
        _log.warning("another process of the server could not be answered: %s", error or type(error).__name__)
    except asyncio.CancelledError:
        pass  # The server is shutting down. Do not re-raise: asyncio's streams log a cancelled handler with a traceback.
    finally:
        writer.close()


async def _ask(path: Path, what: str, arguments: tuple[Any, ...], patience_s: float | None) -> _Outcome | None:
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(_frame((what, arguments)))
                return await _receive(reader, _Outcome)
            finally:
                writer.close()
    except _BROKEN as error:
        if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
            _log.warning("another process of the server did not answer: %s", error or type(error).__name__)
        return None


async def _outcome(answer: Answerer, what: str, arguments: list[Any]) -> _Outcome:
    try:
        return _Outcome(None, await answer(what, arguments))
    except PenstockError as error:
        return _Outcome((type(error).__name__, error.message, error.hint), None)
    except Exception:  # noqa: BLE001 - a bug must not leave the other process waiting
        _log.exception("a request of another process failed")
        return _Outcome(("PenstockError", "internal error", ""), None)


def _kept(path: Path) -> Path:
    """The file that stores the data of the process whose socket is ``path``."""
    return path.with_suffix(".kept")


def _read_kept(path: Path) -> Any:
    try:
        return msgspec.msgpack.decode(_kept(path).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def _frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


async def _receive(reader: asyncio.StreamReader, kind: type[_Form]) -> _Form:
    """Receive one message of type ``kind``. Raises one of the exceptions in ``_BROKEN``."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
