from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.online.repository.seats import Seats


class Timers:
    """A loop's timers and its clock, which ``advance`` sets forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._due.append((self.now + delay_s, callback))

    async def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self._due if timer[0] <= end]:
            self.now, callback = first = min(due, key=lambda timer: timer[0])
            self._due.remove(first)
            callback()
            await settle()
        self.now = end


async def settle() -> None:
    """Let all callbacks run that are due, and those that they cause."""
    for _ in range(20):
        await asyncio.sleep(0)


class Loads:
    """Loads that end when they are told to."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.running: dict[str, asyncio.Future[None]] = {}
        self.tasks: dict[str, asyncio.Task[asyncio.Future[None]]] = {}

    async def ask(self, name: str, used_s: Callable[[], float | None]) -> None:
        def start() -> asyncio.Future[None]:
            self.running[name] = asyncio.get_running_loop().create_future()
            return self.running[name]

        self.tasks[name] = asyncio.create_task(self._seats.begin(start, used_s))
        await settle()

    async def end(self, name: str) -> None:
        self.running.pop(name).set_result(None)
        await settle()


def told(story: Callable[[Timers, Loads], Coroutine[Any, Any, None]], count: int = 2) -> None:
    async def main() -> None:
        timers = Timers()
        await story(timers, Loads(Seats(count, timers.call_later)))

    asyncio.run(main())


def waiting() -> float | None:
    return 0.3


def unknown() -> float | None:
    return None


def test_at_most_so_many_work_and_each_end_makes_room_for_one() -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        for name in "abcd":
            await loads.ask(name, unknown)
        assert list(loads.running) == ["a", "b"]
        await loads.end("b")
        assert list(loads.running) == ["a", "c"]
        await loads.end("a")
        await loads.end("c")
        assert list(loads.running) == ["d"]

    told(story)


@pytest.mark.parametrize("hung", [1, 2, 6, 13])
def test_processes_that_only_wait_hold_up_nobody_for_long(hung: int) -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        for number in range(hung):
            await loads.ask(f"hung{number}", waiting)
        await loads.ask("good", unknown)
        await timers.advance(1.25 * (hung // 2))
        assert "good" in loads.running

    told(story)


def test_a_process_that_works_keeps_its_seat_until_it_waits() -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        is_working = True
        # Half of a CPU, then the little that polling takes.
        await loads.ask("a", lambda: 0.5 * timers.now if is_working else 0.001 * timers.now)
        await loads.ask("b", unknown)
        await timers.advance(5)
        assert list(loads.running) == ["a"]
        is_working = False
        await timers.advance(2)
        assert list(loads.running) == ["a", "b"]

    told(story, 1)


def test_a_process_that_works_again_counts_again() -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        used_s = 0.0
        await loads.ask("a", lambda: used_s)
        await timers.advance(2)
        await loads.ask("b", unknown)
        await loads.ask("c", unknown)
        used_s = 1.0
        await timers.advance(0.25)
        await loads.end("b")
        assert list(loads.running) == ["a"], "it works"
        await timers.advance(1)
        assert list(loads.running) == ["a", "c"], "it waits again"

    told(story, 1)


@pytest.mark.parametrize("is_process", [True, False])
def test_an_endless_loop_holds_up_others_for_ten_seconds(is_process: bool) -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        await loads.ask("endless", (lambda: timers.now) if is_process else unknown)
        await loads.ask("good", unknown)
        await timers.advance(9)
        assert "good" not in loads.running
        await timers.advance(1)
        assert "good" in loads.running

    told(story, 1)


def test_whoever_gives_up_and_whatever_fails_takes_no_seat() -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        def fail() -> asyncio.Future[None]:
            raise RuntimeError("no thread")

        seats = Seats(1, timers.call_later)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no thread"):
                await seats.begin(fail, unknown)
        await loads.ask("a", unknown)
        await loads.ask("b", unknown)
        loads.tasks["b"].cancel()
        await loads.ask("c", unknown)
        await loads.end("a")
        assert list(loads.running) == ["c"]
        await loads.end("c")
        await timers.advance(1)
        assert not timers._due, "nobody looks when nothing loads"

    told(story, 1)


def test_more_seats_take_effect_when_somebody_asks() -> None:
    async def story(timers: Timers, loads: Loads) -> None:
        seats = Seats(1, timers.call_later)
        loads = Loads(seats)
        await loads.ask("a", unknown)
        seats.count = 2
        await loads.ask("b", unknown)
        assert list(loads.running) == ["a", "b"]

    told(story)
