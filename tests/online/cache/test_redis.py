import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from penstock.clock import Clock, ManualClock, SystemClock
from penstock.errors import InvalidConfig
from penstock.online.cache.answer import CachedAnswer, freeze
from penstock.online.cache.redis import KEY_PREFIX, Breaker, RedisTier
from penstock.online.cache.response_cache import ResponseCache
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import ModelStatistics
from real import RealProcess, answers, free_port

KEY = b"k" * 32
NAME = KEY_PREFIX + KEY.hex().encode()
ANSWER = freeze(InferResponse("m", "1", {"y": np.arange(4, dtype=np.float32)}, parameters={"p": "v"}))
SERVER = ["redis-server", "--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port"]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealProcess]:
    with RealProcess([*SERVER, "{port}", "--requirepass", "secret word"]) as server:
        yield server


def url(port: int) -> str:
    return f"redis://:secret%20word@127.0.0.1:{port}/0"


def run(main: Coroutine[Any, Any, None], loop: str = "asyncio") -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main)


def tier(
    port: int, clock: Clock | None = None, ttl_s: float = 60, max_bytes: int = 10_000, timeout_s: float = 30
) -> RedisTier:
    return RedisTier(url(port), ttl_s, max_bytes, clock or SystemClock(), timeout_s)


async def look_up(tier: RedisTier, key: bytes = KEY) -> CachedAnswer | None:
    found: asyncio.Future[CachedAnswer | None] = asyncio.get_running_loop().create_future()
    tier.get(key, found.set_result)
    return await found


async def until(holds: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until ``holds`` returns a true value, and return it; the test's timeout limits the wait."""
    while not (value := await holds()):
        await asyncio.sleep(0.001)
    return value


@given(st.lists(st.tuples(st.sampled_from(["allows", "failed", "succeeded"]), st.floats(0, 100)), max_size=60))
def test_a_breaker_tries_what_is_broken_once_a_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now, last_try, failures = Breaker(3, 1.0, 8.0), 0.0, -100.0, 0
    for step, wait in steps:
        now += wait
        if step == "allows":
            allowed = breaker.allows(now)
            assert allowed or breaker.is_open
            if breaker.is_open and allowed:
                assert now - last_try >= 1.0
                last_try = now
        elif step == "failed":
            breaker.failed(now)
            failures += 1
            if failures >= 3:
                last_try = now
        else:
            breaker.succeeded()
            failures, last_try = 0, -100.0
        assert breaker.is_open is (failures >= 3)
    breaker.failed(now)
    assert not breaker.is_open or breaker.allows(now + 8.0)


def test_pauses_of_a_breaker_double_up_to_the_longest() -> None:
    breaker, now, pauses = Breaker(1, 1.0, 8.0), 0.0, []
    for _ in range(6):
        breaker.failed(now)
        start = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - start)
    assert pauses == [1, 2, 4, 8, 8, 8]
    breaker.succeeded()
    assert breaker.allows(now)


@pytest.mark.parametrize("url", ["http://:password@host/", "password@host", "redis://host:port:password"])
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidConfig, match="not a valid Redis URL") as caught:
        RedisTier(url, 60, 1000, SystemClock())
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("reply", [b":x\r\n", b"*1\r\n" * 5000, b"$x\r\n", b"*2\r\n:x\r\n"])
def test_a_malformed_reply_is_a_miss(reply: bytes, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (asked := await reader.read(1 << 16)) and not {b"GETRANGE", b"SET"} & set(asked.split(b"\r\n")):
            writer.write(b"+OK\r\n" * asked.count(b"SETINFO"))
        writer.write(reply)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(serve, tmp_path / "redis")
        tier = RedisTier(f"unix://{tmp_path}/redis", 0, 10_000, SystemClock(), timeout_s=60)
        assert await look_up(tier) is None
        tier.put(KEY, ANSWER)
        assert tier._writer is not None
        await tier._writer  # which reports what it did not expect
        await tier.close()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


@pytest.mark.real
@pytest.mark.parametrize("loop", LOOPS)
def test_what_one_server_stored_another_finds(server: RealProcess, loop: str) -> None:
    async def main() -> None:
        one, other, redis = tier(server.port), tier(server.port), Redis.from_url(url(server.port))
        await redis.flushall()
        assert await look_up(other) is None
        one.put(KEY, ANSWER)
        await until(lambda: redis.exists(NAME))
        found = await look_up(other)
        assert found is not None
        np.testing.assert_array_equal(found.outputs["y"], ANSWER.outputs["y"])
        assert found.parameters == {"p": "v"}
        assert 59_000 < await redis.pttl(NAME) <= 60_000
        for each in (one, other, redis):
            await (each.close() if isinstance(each, RedisTier) else each.aclose())

    run(main(), loop)


@pytest.mark.real
def test_without_a_time_to_live_it_stays(server: RealProcess) -> None:
    async def main() -> None:
        one, redis = tier(server.port, ttl_s=0), Redis.from_url(url(server.port))
        await redis.flushall()
        one.put(KEY, ANSWER)
        await until(lambda: redis.exists(NAME))
        assert await redis.pttl(NAME) == -1
        await one.close()
        await redis.aclose()

    run(main())


@pytest.mark.real
def test_neither_too_much_nor_what_is_not_an_answer_is_taken(
    server: RealProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        one, redis = tier(server.port, max_bytes=500), Redis.from_url(url(server.port))
        await redis.flushall()
        large = freeze(InferResponse("m", "1", {"y": np.zeros(1000, np.float32)}))
        await redis.set(NAME, large.to_bytes())
        assert await look_up(one) is None
        assert not caplog.records
        for value in (b"\x80\x04N.", b"PSA1" + b"\xff" * 200):
            await redis.set(NAME, value)
            assert await look_up(one) is None
        assert len(caplog.records) == 1
        one.put(b"l" * 32, large)
        one.put(KEY, ANSWER)
        await until(lambda: look_up(one))
        assert await redis.dbsize() == 1
        await one.close()
        await redis.aclose()

    run(main())


@pytest.mark.real
def test_a_value_of_another_kind_and_a_wrong_password_are_misses(
    server: RealProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        one, redis = tier(server.port), Redis.from_url(url(server.port))
        await redis.flushall()
        await redis.lpush(NAME, b"x")
        assert await look_up(one) is None
        stranger = RedisTier(f"redis://:wrong@127.0.0.1:{server.port}", 60, 1000, SystemClock(), timeout_s=30)
        for _ in range(5):
            assert await look_up(stranger) is None
        (record,) = caplog.records
        assert "wrong" not in record.message.replace("WRONGPASS", "")
        for each in (one, stranger):
            await each.close()
        await redis.aclose()

    run(main())


@pytest.mark.real
def test_a_look_up_that_is_cancelled_tells_nobody_and_closing_ends_all(server: RealProcess) -> None:
    async def main() -> None:
        one, told = tier(server.port), list[object]()
        pending = one.get(KEY, told.append)
        assert pending is not None
        pending.cancel()
        assert await look_up(one) is None
        assert not told
        await asyncio.sleep(0)  # that one's task is over
        for _ in range(100):  # beyond what is asked at one time there is no answer but none
            one.get(KEY, told.append)
        assert told == [None] * 36
        one.put(KEY, ANSWER)
        await one.close()
        assert told == [None] * 36
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.mark.real
def test_a_redis_that_does_not_answer_costs_a_few_short_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def main(server: RealProcess) -> None:
        one = tier(server.port, ManualClock(), timeout_s=0.02)
        server.process.send_signal(signal.SIGSTOP)
        for _ in range(3):
            assert await look_up(one) is None
        assert "TimeoutError" in caplog.text
        answered = list[object]()
        assert one.get(KEY, answered.append) is None  # without waiting any more
        assert answered == [None]
        one.put(KEY, ANSWER)
        await one.close()
        server.process.send_signal(signal.SIGCONT)

    with RealProcess([*SERVER, "{port}"]) as server:
        run(main(server))


class Doubler:
    """A model behind a cache with a second tier; counts its runs."""

    def __init__(self, second: RedisTier) -> None:
        self.cache = ResponseCache(1 << 20, SystemClock(), second)
        self.model = self.cache.of("digest", "1", ModelStatistics(), 100)
        self.runs = 0

    async def ask(self, value: float) -> float:
        request = InferRequest("m", {"x": np.array([value], np.float32)}, "1")
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def submit(done: Done) -> None:
            self.runs += 1
            done(InferResponse("m", "1", {"y": request.inputs["x"] * 2}))

        self.model.answer(request, answer.set_result, submit)
        outcome = await answer
        assert isinstance(outcome, InferResponse)
        return float(outcome.outputs["y"][0])


@pytest.mark.real
@pytest.mark.parametrize("loop", LOOPS)
def test_redis_may_be_killed_and_come_back_and_no_client_sees_it(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    port, clock = free_port(), ManualClock()
    command = [*SERVER, str(port), "--requirepass", "secret word"]

    def start() -> RealProcess:
        return RealProcess(command, lambda _: answers(port))

    async def main() -> None:
        second = tier(port, clock)
        with start() as first:
            model = Doubler(second)
            assert await model.ask(1) == 2
            shared = Redis.from_url(url(port))
            await until(shared.dbsize)
            await shared.aclose()
            other = Doubler(second)
            assert await other.ask(1) == 2
            assert other.runs == 0
            first.process.kill()
            first.process.wait()
            for value in range(10):
                assert await Doubler(second).ask(value) == 2 * value
                assert await model.ask(value) == 2 * value
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "continues without it" in caplog.text
        for _ in range(20):  # still gone, at each trial
            clock.advance(30)
            assert await model.ask(clock.now()) == 2 * clock.now()
        assert len(caplog.records) == 1
        with start():
            clock.advance(30)
            await model.ask(100)
            assert "Redis is available again" in caplog.text
            await model.ask(101)
            shared = Redis.from_url(url(port))
            await until(shared.dbsize)
            await shared.aclose()
            await second.close()
        assert len(caplog.records) == 2
        assert "secret" not in caplog.text

    run(main(), loop)
