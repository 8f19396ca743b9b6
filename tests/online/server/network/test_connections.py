"""Connections counted, swept and drained together."""

import asyncio

from penstock.online.server.network.connections import Connections, ServerConnection


class Recorded(ServerConnection):
    """Writes down what is asked of it; closes when told to, if it is idle."""

    def __init__(self, connections: Connections, is_idle: bool = True) -> None:
        self.connections = connections
        self.is_idle = is_idle
        self.calls: list[object] = []

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

    def abort(self) -> None:
        self.calls.append("abort")
        self.connections.discard(self)


def test_the_limit() -> None:
    connections = Connections(2)
    three = [Recorded(connections) for _ in range(3)]
    assert [connections.add(each) for each in three] == [True, True, False]
    assert len(connections) == 3  # it is there until it has closed
    connections.discard(three[2])
    connections.discard(three[0])
    assert connections.add(three[2])
    connections.check_time(7.5)
    connections.abort()
    assert (three[0].calls, three[1].calls) == ([], [7.5, "abort"])
    assert len(connections) == 0


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
