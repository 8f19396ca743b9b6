"""Fuzzes what the processes of one server tell each other: a sibling's question, and a sibling's answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from penstock.online.server.processes import group
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import LENGTH, resized, sized
from tests.fuzz.planes import Planes
from tests.fuzz.target import Target

_QUESTIONS: Sequence[tuple[str, list[Any]]] = (
    ("statistics", []),
    ("report", []),
    ("state", []),
    ("log_settings", [{"log_info": True}]),
    ("trace_settings", ["m", {"trace_rate": "7"}]),
    ("register_shared_memory", ["r", "/penstock_fuzz", 0, 64]),
    ("unregister_shared_memory", [""]),
    ("forget_regions", ["c"]),
)
_ANSWERS: Sequence[Any] = ((None, [{"name": "m"}]), (("NotFound", "no such region", ""), None))


def _seed(message: Any) -> Seed:
    return sized(msgspec.msgpack.encode(message))


class _Writer:
    """Of what a sibling gets."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class PeersTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\xc0",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 3000,
        b"\xcf" + b"\xff" * 8,
        b"\x80",
    )

    def __init__(self) -> None:
        self.seeds = [_seed(message) for message in (*_QUESTIONS, *_ANSWERS)]
        self._loop = FastLoop()
        self._planes: Planes = self._loop.run_until_complete(self._make())
        self._valid = b"".join(_seed(("state", [])))
        # A sibling that asks for what there is not is a bug of ours, and logged as one.
        self._log = logging.getLogger(group.__name__)
        self._log.disabled = True

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        return resized(data) if random.random() < 0.7 else data

    def run(self, data: bytes) -> None:
        self._loop.run_until_complete(self._run(data))
        assert not self._loop.failures, self._loop.failures

    def close(self) -> None:
        self._log.disabled = False
        self._planes.shared_memory.close()
        self._loop.close()

    async def _run(self, data: bytes) -> None:
        await self._ask(data)
        try:
            outcome = await group._receive(_reader(data), group._Outcome)
        except group._BROKEN:
            pass
        else:
            assert outcome.error is None or len(outcome.error) == 3
        answer = await self._ask(self._valid)
        error, state = msgspec.msgpack.decode(answer[LENGTH.size :])
        assert error is None
        assert sorted(state) == ["log", "regions", "trace"]

    async def _ask(self, data: bytes) -> bytes:
        writer: Any = _Writer()
        await group._handle(self._planes.control.answer, _reader(data), writer)
        assert writer.is_closed
        if writer.written:
            assert len(msgspec.msgpack.decode(writer.written[LENGTH.size :])) == 2
        return bytes(writer.written)

    async def _make(self) -> Planes:
        return Planes(self._loop)


def _reader(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader
