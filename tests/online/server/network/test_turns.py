"""Connections share the work: its amount per event-loop iteration, and its distribution."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.online.server.network.turns import CONTROL_UNITS, MAX_SKIPPED, PAUSE_UNITS, SLICE_UNITS, TURN_UNITS, Turns


class Load:
    """A worker with ``left`` units of work, in steps of ``step`` units. Records the order of the work."""

    def __init__(self, turns: Turns, left: int, order: list["Load"], step: int = 1) -> None:
        self.turns, self.left, self.order, self.step = turns, left, order, step

    def work(self, units: int) -> int:
        used = 0
        while used < units and used < self.left:
            used += self.step
        self.left -= used
        self.order.append(self)
        if self.left > 0:
            self.turns.add(self)
        return used


def on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_the_work_of_one_iteration_is_bounded(loads: list[int]) -> None:
    async def main() -> None:
        turns, order = Turns(), list[Load]()
        workers = [Load(turns, left, order) for left in loads]
        for worker in workers:
            turns.add(worker)
        while any(worker.left > 0 for worker in workers):
            before = sum(worker.left for worker in workers)
            await asyncio.sleep(0)
            done = before - sum(worker.left for worker in workers)
            assert 0 < done <= TURN_UNITS // 2 + max(SLICE_UNITS, TURN_UNITS // 2 // len(loads))

    on_loop(main)


def test_one_that_fails_does_not_hold_up_the_others() -> None:
    class Failing:
        def work(self, units: int) -> int:
            raise ValueError("a bug")

    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        turns, order = Turns(), list[Load]()
        other = Load(turns, 10, order)
        turns.add(Failing())
        turns.add(other)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (other.left, len(failures)) == (0, 1)

    on_loop(main)


def test_they_take_turns() -> None:
    async def main() -> None:
        turns, order = Turns(), list[Load]()
        long, *others = (Load(turns, left, order) for left in (100_000, 10, 10, 10))
        for worker in (long, *others):
            turns.add(worker)
        for _ in range(4):
            await asyncio.sleep(0)
        assert [worker.left for worker in others] == [0, 0, 0]
        assert long.left > 0

    on_loop(main)


def test_new_data_uses_what_is_left() -> None:
    async def main() -> None:
        turns = Turns()
        assert turns.left == TURN_UNITS
        turns.spend(TURN_UNITS - 100)
        assert turns.left == 100
        turns.spend(5000)
        assert turns.left < 0
        await asyncio.sleep(0)
        assert turns.left < 0  # one step was too large; later iterations compensate for it
        for _ in range(5000 // TURN_UNITS + 1):
            await asyncio.sleep(0)
        assert turns.left == TURN_UNITS

    on_loop(main)


def test_a_step_that_was_too_large_keeps_those_that_wait_waiting() -> None:
    async def main() -> None:
        turns, order = Turns(), list[Load]()
        turns.add(Load(turns, 5000, order, step=5000))
        turns.add(Load(turns, 1, order))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(order) == 1
        for _ in range(5000 // TURN_UNITS + 2):
            await asyncio.sleep(0)
        assert len(order) == 2

    on_loop(main)


def test_coroutines_wait_for_turns_too_and_one_that_is_cancelled_takes_none() -> None:
    async def main() -> None:
        turns, done = Turns(), list[int]()

        async def request(number: int) -> None:
            await turns.wait(TURN_UNITS // 2)
            done.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        before = 0
        while len(done) < 5:
            await asyncio.sleep(0)
            assert len(done) - before <= 1
            before = len(done)
        assert done == [0, 1, 2, 4, 5]

    on_loop(main)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_the_loop_pauses_for_other_threads_while_it_has_more_work(loads: list[int]) -> None:
    async def main() -> None:
        order = list[Load]()
        left_at_pauses: list[int] = []
        turns = Turns(lambda _: left_at_pauses.append(sum(worker.left for worker in workers)))
        workers = [Load(turns, left, order) for left in loads]
        for worker in workers:
            turns.add(worker)
        while any(worker.left > 0 for worker in workers):
            await asyncio.sleep(0)
        steps = [before - after for before, after in pairwise([sum(loads), *left_at_pauses, 0])]
        assert max(steps) <= PAUSE_UNITS + TURN_UNITS
        assert min(steps[:-1], default=PAUSE_UNITS) >= PAUSE_UNITS
        assert 0 not in left_at_pauses

    on_loop(main)


def test_a_connection_does_not_wait_for_hundreds_of_requests_and_they_continue_too() -> None:
    async def main() -> None:
        turns, order = Turns(), list[Load]()
        requests = [asyncio.create_task(turns.wait(CONTROL_UNITS)) for _ in range(500)]
        await asyncio.sleep(0)
        for _ in range(20):
            worker = Load(turns, SLICE_UNITS, order)
            turns.add(worker)
            for _ in range(2):
                await asyncio.sleep(0)
            assert worker.left == 0
        assert sum(request.done() for request in requests) <= 45  # one an iteration, at most
        busy = Load(turns, 10**9, order)
        turns.add(busy)
        before = sum(request.done() for request in requests)
        for _ in range(10 * (MAX_SKIPPED + 2)):
            await asyncio.sleep(0)
        assert sum(request.done() for request in requests) >= before + 8
        busy.left = 0
        await asyncio.gather(*requests)

    on_loop(main)
