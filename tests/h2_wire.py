"""A connection of our HTTP/2 without a socket: what it writes, whether it reads, and its work in each iteration of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import hpack

from h2_servers import ECHO, Frame, GrpcServer, data_frame, message
from penstock.clock import ManualClock
from penstock.online.server.config import ServerConfig
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.sniffer import PREFACE
from penstock.online.server.network.turns import Turns, TurnTaker
from penstock.protocol import h2_frames as h2

ITERATIONS = 20_000
"""More than any exchange takes."""
READ_BYTES = 1 << 18


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.ended = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, data: list[bytes]) -> None:
        for part in data:
            self.written += part

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_protocol(self, protocol: object) -> None:
        """Bytes come to the connection in any case."""

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        return None


class CountedTurns(Turns):
    """Turns that note the units used, over all connections, since ``count`` was last read."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0
        self.begun = 0
        """Turns of connections that waited."""

    def spend(self, units: int) -> None:
        self.used += units
        super().spend(units)

    def add(self, worker: TurnTaker) -> None:
        super().add(_Counted(worker, self))


class _Counted:
    def __init__(self, worker: TurnTaker, turns: CountedTurns) -> None:
        self.worker = worker
        self.turns = turns

    def work(self, units: int) -> int:
        self.turns.begun += 1
        used = self.worker.work(units)
        self.turns.used += used
        return used


class Lab:
    """What the connections of a server share, with the methods of ``GrpcServer``. To be made on a running loop."""

    def __init__(self, **config: Any) -> None:
        self.server = GrpcServer()
        self.clock = ManualClock()
        self.config = ServerConfig(**config)
        self.turns = CountedTurns()
        connections = Connections(1000)
        connections.turns = self.turns
        self.shared = H2Context(self.server.methods(), self.config, connections, self.clock)
        self.clients: list[Client] = []
        self.units: list[int] = []
        """The work of each iteration of the loop."""

    def open(self) -> Client:
        """A client that has sent nothing."""
        client = Client(self.shared)
        self.clients.append(client)
        return client

    def connect(self, **settings: int) -> Client:
        """A client that has greeted."""
        client = self.open()
        values = {getattr(h2, name.upper()): value for name, value in settings.items()}
        client.connection.data_received(PREFACE + h2.settings(values))
        return client

    async def settle(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let the loop run, and what the clients send arrive, until there is nothing left to do."""
        idle = 0
        for _ in range(ITERATIONS):
            is_busy = [client.arrive() for client in self.clients]
            idle = 0 if any(is_busy) else idle + 1
            await asyncio.sleep(0)
            self.units.append(self.turns.used)
            self.turns.used = 0
            if idle > 3 or until():
                return
        raise AssertionError("it did not come to an end")


class Client:
    """One client. What it sends arrives while the server reads, as much in each iteration as a loop reads."""

    def __init__(self, shared: H2Context) -> None:
        self.wire = Wire()
        self.connection = H2Connection(shared)
        self.encoder = hpack.Encoder()
        transport: Any = self.wire
        self.connection.connection_made(transport)
        self._to_send = bytearray()

    def block(self, path: str = ECHO, **more: str | None) -> bytes:
        """The header block of a request; None leaves a usual field out."""
        usual = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"}
        fields = usual | {name.replace("_", "-"): value for name, value in more.items()}
        return bytes(self.encoder.encode([(name, value) for name, value in fields.items() if value is not None]))

    def headers(self, stream_id: int, path: str = ECHO, flags: int = h2.END_HEADERS, **more: str | None) -> bytes:
        return h2.frame(h2.HEADERS, flags, stream_id, self.block(path, **more))

    def request(self, stream_id: int, data: bytes = b"hello", path: str = ECHO) -> bytes:
        return self.headers(stream_id, path) + data_frame(stream_id, message(data), h2.END_STREAM)

    def send(self, *data: bytes) -> None:
        for each in data:
            self._to_send += each

    def arrive(self) -> bool:
        """Let the next bytes arrive, if the server reads; False if nothing is going on."""
        if not self._to_send or not self.wire.reading:
            return not (self.wire.reading or self.wire.ended)
        data, self._to_send = bytes(self._to_send[:READ_BYTES]), self._to_send[READ_BYTES:]
        self.connection.data_received(data)
        return True

    def frames(self) -> list[Frame]:
        """The frames that the server has written."""
        found, position, data = [], 0, bytes(self.wire.written)
        while position < len(data):
            high, low, kind, flags, stream_id = h2.HEADER.unpack_from(data, position)
            stop = position + 9 + (high << 8 | low)
            assert stop <= len(data)
            found.append(Frame(kind, flags, stream_id, data[position + 9 : stop]))
            position = stop
        return found

    def of(self, kind: int) -> list[Frame]:
        return [frame for frame in self.frames() if frame.kind == kind]

    @property
    def goaway(self) -> int | None:
        """The code of the last GOAWAY."""
        found = self.of(h2.GOAWAY)
        return h2.GOAWAY_HEAD.unpack_from(found[-1].payload)[1] if found else None


def on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())
