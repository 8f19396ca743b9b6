"""A connection without a socket: a client that sends in any pieces, and reads at once, slowly or never."""

from __future__ import annotations

import asyncio
import errno
import logging
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from random import Random
from typing import Any, cast

from penstock.online.server.network.connections import ServerConnection
from tests.fuzz.fast_loop import FastLoop
from tests.fuzz.planes import Planes

_PATIENCE_S = 25.0
_MAX_SWEEPS = 40
_HIGH_WATER = 64 << 10
_GONE = -2
_MAX_UNREAD = 2 << 20


class Transport(asyncio.Transport):
    """As the event loop's own; ``written`` is all that was sent. Its client reads ``rate`` bytes a step, 0: nothing ever,
    less: all at once."""

    def __init__(self, loop: FastLoop, connection: ServerConnection, rate: int) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False
        self.was_cut = False
        self.is_paused = False
        self._loop = loop
        self._protocol: asyncio.BaseProtocol = connection
        self._rate = rate
        self._unread = 0
        self._high_water = _HIGH_WATER
        self._is_full = False
        self._is_closing = False
        self._has_ended = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def receive(self, data: bytes) -> None:
        """Give ``data`` to whoever has the connection by then."""
        while data and not self._is_closing:
            protocol = self._protocol
            if isinstance(protocol, asyncio.BufferedProtocol):
                place = memoryview(protocol.get_buffer(len(data)))
                count = min(len(place), len(data))
                assert count, "there is no place for what was received"
                place[:count] = data[:count]
                protocol.buffer_updated(count)
                data = data[count:]
            else:
                cast(asyncio.Protocol, protocol).data_received(data)
                return

    def end(self) -> bool | None:
        """The client has sent all that it will; whether the connection stays open."""
        return cast(asyncio.Protocol, self._protocol).eof_received()

    def write(self, data: Any) -> None:
        assert not self._has_ended, "something is written after the end"
        if self._is_closing:
            return
        self.written.append(bytes(data))
        if self._rate < 0:
            return
        if not self._unread and self._rate:
            self._loop.call_later(0.01, self._read)
        self._unread += len(data)
        assert self._unread <= _MAX_UNREAD, f"{self._unread} bytes are held for a client that does not read"
        if self._unread > self._high_water and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._unread

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_water = _HIGH_WATER if high is None else high

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_ended = True
        if self._rate == _GONE:
            raise OSError(errno.ENOTCONN, "the client has left")

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._unread:
                self._loop.call_soon(self._lose)

    def abort(self) -> None:
        self.was_cut = True
        self._is_closing = True
        self._loop.call_soon(self._lose)

    def _read(self) -> None:
        self._unread = max(0, self._unread - self._rate)
        if self._unread:
            self._loop.call_later(0.01, self._read)
        elif self._is_closing:
            self._lose()
        if self._is_full and self._unread < self._high_water // 4 and not self.is_closed:
            self._is_full = False
            self._protocol.resume_writing()

    def _lose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._protocol.connection_lost(None)


class Watch(logging.Handler):
    """Remembers what the server itself calls an error: what it caught because it should not have happened."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []
        self._logger = logging.getLogger("penstock")
        self._before = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False

    def stop(self) -> None:
        """Leave the log as it was found."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._before

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def check(self) -> None:
        """Raise the first of them."""
        if self.records:
            record, self.records = self.records[0], []
            error = record.exc_info[1] if record.exc_info else None
            raise AssertionError(f"the server logged: {record.getMessage()}: {error!r}") from error


class Lab:
    """Runs connections one after the other, each to its end, and looks whether anything is left of them."""

    def __init__(self) -> None:
        self.loop = FastLoop()
        self.planes = self.run(_make(lambda: Planes(self.loop)))
        self._watch = Watch()

    def close(self) -> None:
        """Leave the process as it was found."""
        self._watch.stop()
        self.planes.shared_memory.close()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def try_out(self, make: Callable[[], ServerConnection], data: bytes) -> Transport:
        """Send ``data`` on a new connection in pieces that follow from it, be silent or end, and wait until all is over."""
        random = Random(zlib.crc32(data))
        for number, scheduler in enumerate(self.planes.schedulers):
            scheduler.count = random.randrange(3) + number
        rate = random.choice((-1, -1, -1, _GONE, 100, 5000, 100_000, 0))
        return self._see_through(self._talk(make, list(pieces(data, random)), rate, random.random() < 0.3))

    def ask(self, make: Callable[[], ServerConnection], data: bytes) -> bytes:
        """Send ``data`` on a new connection as clients do; what was answered."""
        return b"".join(self._see_through(self._talk(make, [data], -1, False)).written)

    def _see_through(self, talk: Coroutine[Any, Any, Transport]) -> Transport:
        transport: Transport = self.run(talk)
        self._watch.check()
        if self.loop.failures:
            context = self.loop.failures.pop()
            raise AssertionError(f"the event loop caught: {context}") from context.get("exception")
        self.planes.check_idle()
        return transport

    async def _talk(
        self, make: Callable[[], ServerConnection], data: Sequence[bytes], rate: int, ends: bool
    ) -> Transport:
        connection = make()
        transport = Transport(self.loop, connection, rate)
        connection.connection_made(transport)
        sweeps = 0
        for piece in data:
            while transport.is_paused and not transport.is_closing():
                sweeps = await self._sweep(transport, sweeps)
            if transport.is_closing():
                break
            transport.receive(piece)
            if len(piece) % 3 == 0:
                await asyncio.sleep(0)
        if ends and not transport.is_closing() and not transport.end():
            transport.close()
        while not transport.is_closed:
            sweeps = await self._sweep(transport, sweeps)
        # What the models are still at has nowhere to go.
        await asyncio.sleep(_PATIENCE_S)
        return transport

    async def _sweep(self, transport: Transport, sweeps: int) -> int:
        assert sweeps < _MAX_SWEEPS, "the connection neither closes nor comes to rest"
        cast(ServerConnection, transport.get_protocol()).check_time(self.loop.now())
        await asyncio.sleep(_PATIENCE_S / 3)
        return sweeps + 1


def pieces(data: bytes, random: Random) -> Iterator[bytes]:
    """``data`` as a network may cut it: in one, in a few, or byte by byte around places of interest."""
    way = random.random()
    position = 0
    while position < len(data):
        if way < 0.5:
            size = len(data)
        elif way < 0.9:
            size = random.choice((1, 5, 9, 50, 400, 3000, 40_000))
        else:
            size = random.choice((1, 1, 2, 3, 200))
        yield data[position : position + size]
        position += size


async def _make(make: Callable[[], Planes]) -> Planes:
    return make()
