"""Fuzzes the replies of Redis to the cache's second tier: the server sends a message and closes the connection."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from random import Random

import numpy as np

from penstock.online.cache import redis
from penstock.online.cache.answer import CachedAnswer, freeze
from penstock.request import InferRequest, InferResponse
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import pieces
from tests.fuzz.target import Target

_PAUSE_S = 60.0
_MAX_BYTES = 1 << 16
_STORED = freeze(InferResponse("m", "1", {"y": np.arange(4, dtype=np.float32)})).to_bytes()


class RedisReplyTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"$-1\r\n",
        b"$99999999\r\n",
        b"*-1\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 2000,
        b":x\r\n",
        b"-MOVED 1 a:b\r\n",
        b"-LOADING\r\n",
        b"_\r\n",
        b"+\xff\r\n",
        b"\r\n",
    )

    def __init__(self) -> None:
        good = (b"$%d\r\n" % len(_STORED), *pieces(_STORED, 16), b"\r\n")
        self.seeds: Sequence[Seed] = [
            good,
            (b"$0\r\n", b"\r\n"),
            (b"-ERR wrong\r\n",),
            (b"*2\r\n", b":1\r\n", b"+OK\r\n"),
            (b"$-1\r\n",),
        ]
        self._valid = b"".join(good)
        self._loop = FastLoop()
        self._folder = tempfile.TemporaryDirectory()
        self._reply = b""
        path = f"{self._folder.name}/redis"
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        self._tier = redis.RedisTier(f"unix://{path}", 1, _MAX_BYTES, self._loop)
        self._log = logging.getLogger(redis.__name__)
        self._log.disabled = True

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        start = data.find(b"\r\n") + 2
        if data.startswith(b"$") and random.random() < 0.6:
            data = b"$%d\r\n%b\r\n" % (len(data[start:-2]), data[start:-2])
        return data

    def run(self, data: bytes) -> None:
        self._loop.run_until_complete(self._ask(data))
        found = self._loop.run_until_complete(self._ask(self._valid))
        assert found is not None, "a valid reply is not understood"
        assert found.to(InferRequest("m", {})).outputs["y"].tolist() == [0, 1, 2, 3]

    def close(self) -> None:
        self._log.disabled = False
        self._loop.run_until_complete(self._stop())
        self._loop.close()
        self._folder.cleanup()

    async def _ask(self, reply: bytes) -> CachedAnswer | None:
        self._reply = reply
        await asyncio.sleep(_PAUSE_S)  # as long as the breaker may be open
        await self._tier._redis.connection_pool.disconnect()  # the server has closed it, which would be a miss
        found: list[CachedAnswer | None] = []
        task = self._tier.get(b"k" * 32, found.append)
        await asyncio.wait([task])  # type: ignore[list-item]
        assert len(found) == 1, f"the request has {len(found)} answers"
        assert not self._loop.failures, self._loop.failures
        return found[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"GETRANGE" not in (asked := await reader.read(1 << 16)) and asked:
            writer.write(b"+OK\r\n" * asked.count(b"SETINFO"))  # the client introduces itself
        writer.write(self._reply)
        writer.close()

    async def _stop(self) -> None:
        await self._tier.close()
        self._server.close()
        await self._server.wait_closed()
