"""Work in steps: each step announces its memory in advance, and several jobs take turns."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from announced_steps import announced
from penstock.errors import Unavailable
from penstock.online.server.to_thread import Steps, beside, finish, in_steps, run


def count(name: str, steps: int, log: list[str]) -> Steps[str]:
    for number in range(steps):
        yield 10 * (number + 1)
        log.append(name)
    return name


async def free(size: int) -> None:
    """Charges nothing."""


def test_the_result_of_work_without_and_with_steps() -> None:
    log: list[str] = []
    assert [finish(count("a", steps, log)) for steps in (0, 3)] == ["a", "a"]
    assert asyncio.run(in_steps(count("b", 2, log), free)) == "b"
    assert asyncio.run(in_steps(count("c", 0, log), free)) == "c"
    assert asyncio.run(run(lambda: 5)) == 5
    assert log == ["a"] * 3 + ["b"] * 2


def test_what_stays_in_memory_counts_too() -> None:
    log: list[str] = []
    assert announced(beside(100, count("a", 3, log))) == ([110, 120, 130], "a")
    assert announced(beside(100, count("a", 0, log))) == ([], "a")


def test_every_step_is_charged_before_it_runs_and_none_after_a_refusal() -> None:
    log: list[str] = []

    async def charge(size: int) -> None:
        log.append(str(size))
        if size > 20:
            raise Unavailable("full")

    with pytest.raises(Unavailable):
        asyncio.run(in_steps(count("a", 5, log), charge))
    assert log == ["10", "a", "20", "a", "30"]


def test_every_step_runs_in_a_turn_and_none_after_a_refusal() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        log.append("begin")
        if len(log) > 5:
            raise Unavailable("gone")
        yield
        log.append("end")

    with pytest.raises(Unavailable):
        asyncio.run(in_steps(count("a", 5, log), free, turn))
    assert log == ["begin", "a", "end", "begin", "a", "end", "begin"]


def test_short_work_passes_long_work() -> None:
    log: list[str] = []

    async def both() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.gather(in_steps(count("long", 50, log), free), in_steps(count("short", 2, log), free))

    asyncio.run(both())
    assert log.index("short") < 5
    assert len(log) == 52


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> Steps[None]:
        yield 1
        raise Unavailable("broken")

    with pytest.raises(Unavailable, match="broken"):
        asyncio.run(in_steps(fail(), free))
    with pytest.raises(Unavailable, match="broken"):
        finish(fail())
