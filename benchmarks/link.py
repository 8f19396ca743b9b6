"""A network link of a given speed, round trip, jitter and loss, as a proxy in front of a server on this machine."""

from __future__ import annotations

import asyncio
import random
import threading
from types import TracebackType
from typing import Self

from penstock.perf.http_client import Address

_CHUNK = 16 << 10
_RESEND_S = 0.2
"""Time until a sender repeats a lost packet: the least retransmission time-out of Linux."""


class Link:
    """Forwards connections to ``target``. Each direction has ``bits_per_s``; a packet arrives half a ``round_trip_s`` later, plus
    up to ``jitter_s``. A share ``loss`` of the packets, of 16 KiB, is sent twice. Later packets wait for it.
    """

    def __init__(
        self, target: Address, bits_per_s: float, round_trip_s: float, *, jitter_s: float = 0.0, loss: float = 0.0
    ) -> None:
        self._target = target
        self.bits_per_s, self.round_trip_s = bits_per_s, round_trip_s
        """May be changed at any time."""
        self._jitter_s, self._loss = jitter_s, loss
        self._rng = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self._port)

    def cut(self) -> None:
        """Deliver nothing from now on; connections stay open, as if the device had lost its network."""
        self._is_cut = True

    def reset(self) -> None:
        """Close all connections, also new ones."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._close_all)

    def mend(self) -> None:
        """Deliver again, on new connections."""
        self._is_cut = False
        self._loop.call_soon_threadsafe(self._close_all)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        self._close_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers |= {writer, there_writer}
        try:
            await asyncio.gather(self._carry(reader, there_writer), self._carry(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, there_writer):
                self._writers.discard(one)
                one.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction of a connection. The link is busy with one chunk at a time; its delay does not keep it busy."""
        free_at = 0.0
        arriving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(arriving, writer))
        try:
            while data := await reader.read(_CHUNK):
                free_at = max(self._loop.time(), free_at) + len(data) * 8 / self.bits_per_s
                arriving.put_nowait((free_at + self._delay_s(), data))
                await asyncio.sleep(free_at - self._loop.time())
        finally:
            arriving.put_nowait((0.0, b""))
            await delivery

    def _delay_s(self) -> float:
        lost = _RESEND_S if self._rng.random() < self._loss else 0.0
        return self.round_trip_s / 2 + self._rng.uniform(0, self._jitter_s) + lost

    async def _deliver(self, arriving: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while (item := await arriving.get())[1]:
            await asyncio.sleep(item[0] - self._loop.time())
            if not self._is_cut:
                writer.write(item[1])
        if not self._is_cut:
            writer.close()
