"""Many requests on one connection: they take turns with other connections, and responses keep their order."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_servers import LOOPS, PATIENCE_S, GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.table import AccessTable
from penstock.online.server.body_buffer import READ_BYTES
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.exchange import Exchange, later
from penstock.online.server.http.routes import Resource, Route
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.turns import BYTES_A_UNIT, TURN_UNITS, UNIT_S

TURN_BYTES = TURN_UNITS * BYTES_A_UNIT
LONG_S = 1.5 * TURN_UNITS * UNIT_S
"""Longer than an iteration may take."""


class Transport(asyncio.Transport):
    """Records the written data, and whether the connection reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reads = True
        self.protocol: Any = None

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        self.written += b"".join(parts)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Calls:
    """Handlers that count their calls; ``long`` takes longer than the time of one event-loop iteration."""

    def __init__(self) -> None:
        self.count = 0

    def short(self, exchange: Exchange, route: Route) -> None:
        """Answers."""
        self.count += 1
        exchange.reply_json(exchange.body.decode() if isinstance(exchange.body, bytes) else len(exchange.body))

    def long(self, exchange: Exchange, route: Route) -> None:
        """Answers after a while."""
        end = perf_counter() + LONG_S
        while perf_counter() < end:
            pass
        self.short(exchange, route)

    @later
    async def control(self, exchange: Exchange, route: Route) -> int:
        """Answers in a later iteration."""
        self.count += 1
        return self.count

    def resources(self) -> list[Resource]:
        return [
            Resource("/v2/health/live", {b"GET": self.long, b"POST": self.long}),
            Resource("/v2/health/ready", {b"GET": self.short, b"POST": self.short}),
            Resource("/v2/models/{model}/infer", {b"POST": self.short}, body="InferRequest"),
            Resource("/v2", {b"GET": self.control}),
        ]


class Wire:
    """Connections without sockets, on one loop."""

    def __init__(self, **config: Any) -> None:
        self.calls = Calls()
        access = AccessTable(Access(None, ManualClock()), ())
        self.context = HttpContext(
            self.calls.resources(), access, ServerConfig(**config), Connections(100), ByteBudget(0)
        )

    def connect(self) -> tuple[Http1Connection, Transport]:
        connection, transport = Http1Connection(self.context), Transport()
        connection.connection_made(transport)
        return connection, transport


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize("headers", ["", "X: %d\r\n"], ids=["known heads", "new heads"])
def test_one_iteration_runs_few_of_many_pipelined_requests(headers: str) -> None:
    async def main() -> None:
        wire = Wire()
        connection, transport = wire.connect()
        requests = b"".join(get("/v2/health/live", headers % n if headers else "") for n in range(20))
        connection.data_received(get("/v2/health/live"))
        seen = wire.calls.count
        connection.data_received(requests)
        while wire.calls.count < 21:
            assert wire.calls.count - seen <= 2
            assert not transport.reads
            seen = wire.calls.count
            await asyncio.sleep(0)
        while transport.written.count(b"HTTP/1.1 200") < 21:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert transport.reads

    run(main)


def test_what_is_discarded_is_read_in_turns() -> None:
    async def main() -> None:
        connection, transport = Wire().connect()
        connection.data_received(post(bytes(1_000_000), path="/nothing")[:100_000])
        for _ in range(20):
            read = 0
            while transport.reads:
                connection.data_received(bytes(READ_BYTES))
                read += READ_BYTES
            assert read <= TURN_BYTES + READ_BYTES
            while not transport.reads:
                await asyncio.sleep(0)

    run(main)


def test_a_large_body_is_read_in_turns() -> None:
    async def main() -> None:
        connection, transport = Wire().connect()
        size = 16 * TURN_BYTES
        connection.data_received(post(bytes(size), path="/v2/models/m/infer")[:100_000])
        await asyncio.sleep(0)
        missing = size
        while (receiver := transport.protocol) is not connection:
            read = 0
            while transport.reads and transport.protocol is receiver:
                count = len(receiver.get_buffer(-1))
                assert count <= READ_BYTES
                receiver.buffer_updated(count)
                read += count
            assert read <= TURN_BYTES + READ_BYTES
            missing -= read
            while not transport.reads:
                await asyncio.sleep(0)
        assert 0 < missing <= 100_000
        while not transport.written:
            await asyncio.sleep(0)
        assert transport.written.endswith(b"\r\n\r\n%d" % size)

    run(main)


def test_requests_of_others_pass_those_that_wait() -> None:
    async def main() -> None:
        wire = Wire()
        busy = [wire.connect() for _ in range(8)]
        innocent, answers = wire.connect()
        for connection, _ in busy:
            connection.data_received(get("/v2/health/live") * 10)
        before = wire.calls.count
        for number in range(5):
            innocent.data_received(post(b"%d" % number, path="/v2/health/ready"))
            assert answers.written.count(b"HTTP/1.1 200") == number + 1
            await asyncio.sleep(0)
        assert wire.calls.count - before <= 5 + 2 * 5
        assert wire.calls.count < 80

    run(main)


def test_an_iteration_answers_few_requests_to_the_control_plane() -> None:
    async def main() -> None:
        wire = Wire()
        busy = [wire.connect() for _ in range(4)]
        for connection, _ in busy:
            connection.data_received(get("/v2") * 30)
        seen = wire.calls.count
        while wire.calls.count < 120:
            await asyncio.sleep(0)
            assert wire.calls.count - seen <= 2
            seen = wire.calls.count
        while sum(transport.written.count(b"HTTP/1.1 200") for _, transport in busy) < 120:
            await asyncio.sleep(0)

    run(main)


def test_data_is_not_read_ahead_of_the_requests() -> None:
    async def main() -> None:
        wire = Wire(max_pipelined=4)
        connection, transport = wire.connect()
        many = b"".join(get("/v2", f"X: {n}\r\n") for n in range(2000))
        connection.data_received(many)
        assert len(connection._pending) + len(connection._backlog) <= 4
        assert not transport.reads
        connection.connection_lost(None)
        assert not connection._unparsed

    run(main)


REQUESTS = {
    "get": get("/v2/health/ready"),
    "post": post(b"abc", path="/v2/health/ready"),
    "long": post(b"x" * 9_000, path="/v2/health/ready"),
    "chunked": post(b"", "Transfer-Encoding: chunked\r\n", "/v2/health/ready").replace(b"Content-Length: 0\r\n", b"")
    + b"3\r\nabc\r\n" * 700
    + b"0\r\n\r\n",
    "later": get("/v2"),
    "nothing": get("/nothing"),
    "slow": get("/v2/health/live"),
}
STATUS = {"nothing": b"404"}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=30),
    st.lists(st.integers(1, 60_000), max_size=8),
    st.integers(1, 8),
)
def test_any_pipeline_in_any_pieces_is_answered_in_order(kinds: list[str], cuts: list[int], window: int) -> None:
    async def main() -> None:
        wire = Wire(max_pipelined=window)
        connection, transport = wire.connect()
        data = b"".join(map(REQUESTS.__getitem__, kinds))
        places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, stop in pairwise(places):
            while not transport.reads:
                await asyncio.sleep(0)
            connection.data_received(data[start:stop])
        while transport.written.count(b"HTTP/1.1 ") < len(kinds):
            await asyncio.sleep(0)
        found = [
            line.split()[1] for line in bytes(transport.written).split(b"HTTP/1.1") if line for line in [b"x" + line]
        ]
        assert found == [STATUS.get(kind, b"200") for kind in kinds]
        assert not connection._pending
        assert not connection._backlog
        assert not connection._unparsed

    run(main)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_leaves_while_its_requests_wait_is_noticed(loop: str) -> None:
    with GatedServer(loop, max_pipelined=2) as server:
        server.gate.clear()
        client = server.connect()
        client.send(infer(1))
        assert server.entered.acquire(timeout=PATIENCE_S)
        client.send(infer(2) * 100)
        client.close()
        while server.call(lambda: len(server.connections)):
            server.pass_time(0.1)
        server.gate.set()
        assert server.connect().ask(infer(1)).data == [2, 0]
