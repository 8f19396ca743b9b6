import asyncio
from typing import Any

from calls import FakeCall
from penstock.errors import Code, Unavailable
from penstock.online.server.grpc.health import Health
from penstock.protocol import messages

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


class Server:
    is_ready = True


def health() -> tuple[Health, Server]:
    server = Server()
    return Health(lambda: server.is_ready, frozenset({"known"})), server


def asked(service: str = "") -> bytes:
    return bytes(messages.HealthCheckRequest(service=service).SerializeToString())


def states(call: FakeCall) -> list[int]:
    return [messages.HealthCheckResponse.FromString(data).status for data in call.sent]


def test_check_tells_the_state_of_what_is_known() -> None:
    checks, server = health()

    def ask(data: bytes) -> Any:
        call = FakeCall()
        checks.check(call, data)
        assert call.ended
        return states(call) if call.error is None else call.error.code

    assert ask(asked()) == ask(asked("known")) == [SERVING]
    server.is_ready = False
    assert ask(asked()) == [NOT_SERVING]
    assert ask(asked("absent")) is Code.NOT_FOUND
    assert ask(b"\xff") is Code.INVALID_ARGUMENT


def test_a_watch_is_told_once_of_each_change_until_it_ends() -> None:
    async def run() -> None:
        checks, server = health()
        known, unknown = FakeCall(), FakeCall()
        for call, service in ((known, "known"), (unknown, "absent")):
            checks.watch(call).message(asked(service))
        for server.is_ready in (True, False, False, True):
            checks.announce()
        unknown.cancel()
        checks.drain(Unavailable("stopping"))
        assert states(known) == [SERVING, NOT_SERVING, SERVING]
        assert states(unknown) == [UNKNOWN]
        assert str(known.error) == "stopping"
        assert not checks._watches

    asyncio.run(run())


def test_readiness_is_looked_at_while_somebody_watches() -> None:
    async def run() -> None:
        checks, server = health()
        call, told = FakeCall(), asyncio.Event()
        checks.watch(call).message(asked())
        server.is_ready = False
        call.send = lambda *parts: told.set()  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            await told.wait()
        call.cancel()
        assert not checks._watches

    asyncio.run(run())


def test_a_watch_takes_one_request() -> None:
    async def run() -> None:
        checks, _ = health()
        for messages_sent in ((), (asked(), asked()), (b"\xff",)):
            call = FakeCall()
            watch = checks.watch(call)
            for data in messages_sent:
                watch.message(data)
            watch.half_close()
            assert call.error is not None
            assert call.error.code is Code.INVALID_ARGUMENT
        assert not checks._watches

    asyncio.run(run())


def test_any_number_of_watches_costs_one_timer() -> None:
    async def run() -> None:
        loop, timers = asyncio.get_running_loop(), []
        later = loop.call_later
        loop.call_later = lambda *given: timers.append(given) or later(*given)  # type: ignore[method-assign, func-returns-value]
        checks, _ = health()
        calls = [FakeCall() for _ in range(1000)]
        for call in calls:
            checks.watch(call).message(asked())
        assert len(timers) == 1
        assert all(states(call) == [SERVING] for call in calls)
        checks.drain(Unavailable("stopping"))

    asyncio.run(run())
