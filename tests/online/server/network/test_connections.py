"""Connections counted, swept and drained together."""

import asyncio

import pytest

from http_servers import LOOPS
from penstock.online.server.network.connections import (
    Connections,
    ServerConnection,
    SpareConnections,
    has_left,
    unacknowledged,
)


class Recorded(ServerConnection):
    """A connection that records its calls. It closes on request if it is idle."""

    def __init__(self, connections: Connections, is_idle: bool = True) -> None:
        self.connections = connections
        self.is_idle = is_idle
        self.calls: list[object] = []

    requests = 0

    def check_time(self, now: float) -> None:
        self.calls.append(now)

    def begin_drain(self) -> None:
        assert self.connections.draining
        assert self.connections.leaving
        self.calls.append("begin")

    def close_if_idle(self) -> None:
        self.calls.append("close")
        if self.is_idle:
            self.connections.discard(self)

    def make_room(self) -> bool:
        self.calls.append("room")
        return self.is_idle

    def abort(self) -> None:
        self.calls.append("abort")
        self.connections.discard(self)


def test_the_limit() -> None:
    connections = Connections(2)
    three = [Recorded(connections, is_idle=False) for _ in range(3)]
    assert [connections.add(each) for each in three] == [True, True, False]
    assert len(connections) == 3  # it counts until it has closed
    connections.discard(three[2])
    connections.discard(three[0])
    assert connections.add(three[2])
    connections.check_time(7.5)
    connections.abort()
    assert (three[0].calls, three[1].calls) == (["room"], ["room", 7.5, "abort"])
    assert len(connections) == 0


def test_over_the_limit_the_oldest_idle_connection_makes_room() -> None:
    connections = Connections(3)
    busy, old, young, fourth, fifth = (Recorded(connections, is_idle=number > 0) for number in range(5))
    assert [connections.add(each) for each in (busy, old, young, fourth)] == [True] * 4
    assert (busy.calls, old.calls, young.calls) == (["room"], ["room"], [])
    assert len(connections) == 4, "the old one is there until it has closed"
    connections.discard(old)
    assert connections.add(fifth)
    assert (young.calls, fourth.calls, fifth.calls) == (["room"], [], [])
    # A closing connection no longer counts, so that the next client does not evict another one.
    connections.discard(fifth)
    assert connections.add(fifth)
    assert fourth.calls == []


def test_strangers_make_room_before_clients_that_have_sent_requests() -> None:
    connections = Connections(100)
    clients = [Recorded(connections) for _ in range(50)]
    for client in clients:
        client.requests = 1
        assert connections.add(client)
    for _ in range(1000):
        stranger = Recorded(connections)
        assert connections.add(stranger)
        for closed in list(connections._evicted):
            connections.discard(closed)
    assert not any("room" in client.calls for client in clients)
    # Without strangers, clients make room that have been idle since they were last examined.
    for stranger in list(connections._strangers):
        connections.discard(stranger)
    others = [Recorded(connections) for _ in range(102)]
    for other in others:
        other.requests = 1
        connections.add(other)
        clients[0].requests += 1
    assert "room" not in clients[0].calls
    assert any("room" in client.calls for client in clients[1:])


def test_connections_that_do_not_close_are_bounded() -> None:
    connections = Connections(2)
    assert sum(connections.add(Recorded(connections)) for _ in range(100)) <= 2 * 2 + 1


def test_few_connections_are_looked_at_each_time() -> None:
    connections = Connections(1000)
    busy = [Recorded(connections, is_idle=False) for _ in range(1000)]
    assert all(connections.add(each) for each in busy)
    assert not connections.add(Recorded(connections))
    assert sum(len(each.calls) for each in busy) == 64
    assert not connections.add(Recorded(connections, is_idle=False))
    assert sum(len(each.calls) for each in busy) == 128
    assert max(len(each.calls) for each in busy) == 1


def test_draining() -> None:
    async def run() -> None:
        connections = Connections(9)
        idle, busy = Recorded(connections), Recorded(connections, is_idle=False)
        for each in (idle, busy):
            connections.add(each)
        draining = asyncio.ensure_future(connections.drain())
        while "close" not in busy.calls:
            await asyncio.sleep(0)
        assert idle.calls == busy.calls == ["begin", "close"]
        assert not draining.done()
        connections.discard(busy)
        await draining

    asyncio.run(run())


def test_draining_ends_at_once_without_connections() -> None:
    asyncio.run(Connections(1).drain())


def test_the_oldest_spare_connection_makes_room_whatever_it_does() -> None:
    connections = SpareConnections(2)
    assert connections.draining, "each answer closes its connection"
    three = [Recorded(connections, is_idle=False) for _ in range(3)]
    assert [connections.add(each) for each in three] == [True] * 3
    assert [each.calls for each in three] == [["abort"], [], []]
    assert len(connections) == 2


def test_spare_connections_are_swept_drained_and_aborted_with_the_others() -> None:
    async def run() -> None:
        connections = Connections(1)
        connections.spare = spare = SpareConnections(1)
        one = Recorded(spare)
        spare.add(one)
        connections.check_time(7.5)
        await connections.drain()
        assert one.calls == [7.5, "begin", "close"]
        spare.add(one)
        connections.abort()
        assert one.calls[-1] == "abort"

    asyncio.run(run())


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_closed_transport_has_no_unacknowledged_bytes(loop: str) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, *address)
        assert unacknowledged(transport) == 0
        transport.abort()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (unacknowledged(transport), has_left(transport)) == (0, False)
        server.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
