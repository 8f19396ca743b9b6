"""How the processes of one server talk to each other: each answers the others' control planes on a Unix socket.

A message is its length in 4 bytes, little-endian, and that many bytes of MessagePack: ``[what, arguments]`` to ask,
``[error, result]`` to answer. The sockets lie in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock import errors
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20
_PATIENCE_S = 5.0

Answerer = Callable[[str, list[Any]], Awaitable[Any]]
"""Does what a sibling asks for; the result must be plain data, or structs of msgspec."""


class Peers:
    """The process ``index`` of a server whose processes meet in ``folder``. Belongs to the event loop."""

    def __init__(self, folder: Path, index: int) -> None:
        self._folder = folder
        self._path = folder / f"{index}.sock"
        self._server: asyncio.Server | None = None

    async def serve(self, answer: Answerer) -> None:
        """Answer siblings from now on."""
        self._path.unlink(missing_ok=True)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                what, arguments = await _receive(reader)
                writer.write(_frame(await _outcome(answer, what, arguments)))
                await writer.drain()
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                _log.warning("a sibling process could not be answered: %s", error)
            finally:
                writer.close()

        self._server = await asyncio.start_unix_server(handle, self._path)

    async def ask(self, what: str, *arguments: Any) -> list[Any]:
        """What every sibling answers; those that are just starting or ending are left out. Raises what one of them raises."""
        others = [path for path in self._folder.glob("*.sock") if path != self._path]
        outcomes = await asyncio.gather(*(_ask(path, what, arguments) for path in others))
        for error, _ in (outcome for outcome in outcomes if outcome is not None):
            if error is not None:
                kind, message, hint = error
                raise getattr(errors, kind, PenstockError)(message, hint)
        return [outcome[1] for outcome in outcomes if outcome is not None]

    async def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)


async def _ask(path: Path, what: str, arguments: tuple[Any, ...]) -> tuple[Any, Any] | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(_frame((what, arguments)))
                error, result = await _receive(reader)
                return error, result
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        if not isinstance(error, ConnectionRefusedError | FileNotFoundError):
            _log.warning("a sibling process did not answer: %s", error or type(error).__name__)
        return None


async def _outcome(answer: Answerer, what: str, arguments: list[Any]) -> tuple[Any, Any]:
    try:
        return None, await answer(what, arguments)
    except PenstockError as error:
        return (type(error).__name__, error.message, error.hint), None
    except Exception:  # noqa: BLE001 - a bug of ours must not leave the sibling waiting
        _log.exception("a sibling's question failed")
        return ("PenstockError", "internal error", ""), None


def _frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


async def _receive(reader: asyncio.StreamReader) -> tuple[Any, Any]:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    first, second = msgspec.msgpack.decode(await reader.readexactly(size))
    return first, second
