"""The gate for large requests: order, limits, and progress of every request."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Cancelled
from penstock.online.server.access.gate import SMALL_BYTES, Gate, Passage

UNIT = SMALL_BYTES + 1
LIMIT = 10 * UNIT
PATIENCE_S = 20
FOREVER = 1e6


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


async def settle() -> None:
    """Run everything that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


class Asker:
    """A task that represents a request at the gate."""

    def __init__(self, gate: Gate, size: int) -> None:
        self.passage = Passage(gate)
        self.task = self.hold(size)

    def hold(self, size: int) -> "asyncio.Task[None]":
        self.task = asyncio.create_task(self.passage.hold(size))
        return self.task


def test_small_requests_do_not_pass_it() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, aside=0)
        first = Passage(gate)
        await first.hold(LIMIT)
        for _ in range(1000):
            await Passage(gate).hold(SMALL_BYTES)
        assert gate.used == LIMIT
        first.note(SMALL_BYTES)
        assert gate.used == 0

    run(main)


class CountedGate(Gate):
    """Counts the requests that it examines."""

    examined = 0

    def _fits(self, passage: Passage, size: int) -> bool:
        self.examined += 1
        return super()._fits(passage, size)

    def _fits_aside(self, passage: Passage, size: int) -> bool:
        self.examined += 1
        return super()._fits_aside(passage, size)


def test_thousands_of_requests_take_linear_time() -> None:
    async def main() -> None:
        gate = CountedGate(LIMIT, FOREVER, aside=4 * UNIT)
        count = 2000

        async def pass_through(size: int) -> None:
            passage = Passage(gate)
            await passage.hold(size * UNIT)
            await asyncio.sleep(0)
            passage.leave()

        await asyncio.gather(*(pass_through(size) for size in (1, 9) * (count // 2)))
        assert gate.examined < 10 * count

    run(main)


def test_those_that_do_not_fit_wait_in_order_and_small_ones_do_not_pass_large_ones() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        askers = [Asker(gate, size * UNIT) for size in (6, 5, 1, 9, 1)]
        await settle()
        assert [asker.task.done() for asker in askers] == [True, False, False, False, False]
        askers[0].passage.leave()
        await settle()
        assert [asker.task.done() for asker in askers] == [True, True, True, False, False]
        askers[1].passage.leave()
        await settle()
        assert [asker.task.done() for asker in askers] == [True, True, True, True, False]
        askers[2].passage.leave()
        await settle()
        assert gate.used == 10 * UNIT
        assert gate.waiting == 0

    run(main)


def test_one_larger_than_the_limit_is_worked_on_alone() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        first, large, last = (Asker(gate, size * UNIT) for size in (1, 50, 1))
        await settle()
        assert not large.task.done()
        first.passage.leave()
        await settle()
        assert large.task.done()
        assert not last.task.done()
        large.hold(90 * UNIT)
        await settle()
        assert large.task.done()
        large.passage.leave()
        await settle()
        assert last.task.done()

    run(main)


def test_only_the_oldest_inside_exceeds_the_limit_and_those_inside_go_first() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        old, young, outside = (Asker(gate, UNIT) for _ in range(3))
        await settle()
        waiting = Asker(gate, 9 * UNIT)
        young.hold(20 * UNIT)
        await settle()
        assert not young.task.done()
        old.hold(15 * UNIT)
        await settle()
        assert old.task.done()
        assert not young.task.done()
        old.passage.leave()
        await settle()
        assert young.task.done()
        assert not waiting.task.done()
        young.passage.leave()
        outside.passage.leave()
        await settle()
        assert waiting.task.done()

    run(main)


def test_requests_of_moderate_size_do_not_wait_for_larger_ones() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=8 * UNIT)
        large = [Asker(gate, 50 * UNIT), Asker(gate, 50 * UNIT)]
        moderate = [Asker(gate, UNIT) for _ in range(9)]
        await settle()
        assert [asker.task.done() for asker in (*large, *moderate)] == [True, False] + [True] * 8 + [False]
        assert gate.used == 58 * UNIT
        moderate[0].hold(2 * UNIT)
        await settle()
        assert not moderate[0].task.done()
        moderate[1].passage.leave()
        await settle()
        assert moderate[0].task.done()
        assert not moderate[8].task.done()
        moderate[2].passage.leave()
        await settle()
        assert moderate[8].task.done()
        moderate[8].hold(3 * UNIT)  # no longer moderate: it waits for the larger ones
        await settle()
        assert not moderate[8].task.done()
        for asker in (large[0], *moderate[:8]):
            asker.passage.leave()
        await settle()
        assert moderate[8].task.done()
        assert not large[1].task.done()
        moderate[8].passage.leave()
        await settle()
        assert large[1].task.done()

    run(main)


@pytest.mark.parametrize("way", ["task", "passage"])
def test_a_cancelled_request_leaves_its_place_to_the_next(way: str) -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        inside, gone, following = Asker(gate, 8 * UNIT), Asker(gate, 5 * UNIT), Asker(gate, 2 * UNIT)
        await settle()
        assert not following.task.done()
        if way == "task":
            gone.task.cancel()
        else:
            gone.passage.cancel()
        await settle()
        assert gone.task.done()
        assert following.task.done()
        assert isinstance(gone.task.exception() if way == "passage" else None, Cancelled | None)
        if way == "passage":
            with pytest.raises(Cancelled):
                await gone.passage.hold(1)
        for asker in (inside, gone, following):
            asker.passage.leave()
            asker.passage.leave()
        assert gate.used == gate.waiting == 0

    run(main)


def test_what_exists_already_is_counted_without_waiting() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        outputs = [Passage(gate) for _ in range(3)]
        for passage in outputs:
            passage.note(9 * UNIT)
        assert gate.used == 27 * UNIT
        following = Asker(gate, UNIT)
        second, first = (asyncio.create_task(outputs[place].hold(12 * UNIT)) for place in (1, 0))
        await first
        assert not second.done()
        outputs[0].leave()
        await second
        assert not following.task.done()
        for passage in outputs:
            passage.leave()
        await following.task

    run(main)


def test_requests_that_wait_for_their_model_count_until_nothing_has_moved_for_long() -> None:
    async def main() -> None:
        gate = Gate(LIMIT, 0.01, aside=0)
        parked, working = Passage(gate), Passage(gate)
        await parked.hold(9 * UNIT)
        await working.hold(UNIT)
        parked.park(8 * UNIT)
        assert gate.used == 9 * UNIT
        following = Passage(gate)
        await following.hold(5 * UNIT)  # returns, since ``parked`` no longer counts
        assert gate.used == 6 * UNIT
        parked.note(3 * UNIT)  # its response
        assert gate.used == 9 * UNIT
        for passage in (parked, working, following):
            passage.leave()
        assert gate.used == 0

    run(main)


def test_a_model_that_waits_for_a_request_outside_does_not_stop_the_server() -> None:
    async def main() -> None:
        gate, arrived = Gate(LIMIT, 0.01, aside=0), [asyncio.Event() for _ in range(4)]

        async def request(number: int) -> None:
            passage = Passage(gate)
            await passage.hold(20 * UNIT)
            arrived[number].set()
            passage.park(20 * UNIT)
            for event in arrived:  # like a sequence whose requests arrive in any order
                await event.wait()
            passage.note(30 * UNIT)
            await passage.hold(40 * UNIT)
            passage.leave()

        await asyncio.gather(*map(request, range(4)))
        assert gate.used == gate.waiting == 0

    run(main)


Step = tuple[str, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["hold", "note", "park", "step"]), st.integers(0, 15)), max_size=6),
        max_size=12,
    ),
    st.integers(0, 2**32),
    st.integers(0, 3),
)
def test_in_any_interleaving_all_finish_and_the_limit_holds(
    requests: list[list[Step]], seed: int, leavers: int
) -> None:
    order = random.Random(seed)
    gate = Gate(LIMIT, FOREVER, aside=0)

    async def request(steps: list[Step], passage: Passage) -> None:
        try:
            for what, size in steps:
                for _ in range(order.randrange(3)):
                    await asyncio.sleep(0)
                if what == "hold":
                    await passage.hold(size * UNIT)
                    assert passage.size >= size * UNIT
                    assert gate.used >= passage.size
                elif what == "park":
                    passage.park(min(passage.size, size * UNIT))
                elif what == "note":
                    passage.note(min(passage.size, size * UNIT))
                inside = list(gate._inside)
                assert gate.used == sum(one.size for one in inside)
                # Only one request may exceed the limit, alone or together with the bytes that others already held.
                largest = max((one.size for one in inside), default=0)
                assert gate.used <= LIMIT + largest
        finally:
            passage.leave()

    async def main() -> None:
        passages = [Passage(gate) for _ in requests]
        tasks = [asyncio.create_task(request(*one)) for one in zip(requests, passages, strict=True)]
        for _ in range(leavers):
            await settle()
            if tasks:
                number = order.randrange(len(tasks))
                order.choice([tasks[number].cancel, passages[number].cancel])()
        done: list[Awaitable[None]] = list(tasks)
        for outcome in await asyncio.gather(*done, return_exceptions=True):
            if isinstance(outcome, Exception):
                assert isinstance(outcome, Cancelled), outcome
        assert gate.used == gate.waiting == 0

    run(main)
