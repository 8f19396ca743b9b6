"""Large messages wait to be received; ``test_fairness.py`` has them over connections."""

import asyncio
import random

from penstock.online.server.access.gate import Gate, Passage
from penstock.online.server.h2.call_gate import CallGate

LIMIT = 1 << 20
PATIENCE_S = 20
FOREVER = 1e6


async def settle() -> None:
    """Run everything that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_message_waits_for_room_and_counts_together_with_what_decoding_takes() -> None:
    async def main() -> None:
        gate, opened = Gate(LIMIT, FOREVER, aside=0), asyncio.Event()
        first, call = Passage(gate), CallGate(gate)
        await first.hold(LIMIT)
        for _ in range(2):  # with each frame
            assert not call.admits(LIMIT // 2, opened.set)
            await settle()
        assert (call.is_waiting, gate.waiting, opened.is_set()) == (True, 1, False)
        first.leave()
        await asyncio.wait_for(opened.wait(), PATIENCE_S)
        assert (call.is_waiting, gate.used) == (False, LIMIT // 2)
        assert call.admits(LIMIT // 2, opened.set)
        await call.hold(LIMIT // 4)
        assert gate.used == LIMIT * 3 // 4
        call.park(LIMIT // 3)
        assert gate.used == LIMIT // 2 + LIMIT // 3
        call.leave()
        assert gate.used == 0

    asyncio.run(main())


def test_whenever_calls_leave_nothing_of_them_is_left() -> None:
    async def main(rng: random.Random) -> None:
        gate = Gate(LIMIT, FOREVER, aside=0)
        calls, opened, left = [CallGate(gate) for _ in range(8)], set[int](), set[int]()

        def open_(number: int) -> None:
            assert number not in left
            opened.add(number)

        for _ in range(60):
            number = rng.randrange(len(calls))
            if rng.random() < 0.3:
                calls[number].leave()
                left.add(number)
            elif calls[number].admits(LIMIT * 2 // 3, lambda number=number: open_(number)):
                assert number in opened
            else:
                left.discard(number)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            assert gate.used <= LIMIT
        for call in calls:
            call.leave()
        await settle()
        assert (gate.used, gate.waiting) == (0, 0)

    for seed in range(30):
        asyncio.run(main(random.Random(seed)))
