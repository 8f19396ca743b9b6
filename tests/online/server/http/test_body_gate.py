"""Large bodies wait to be received; ``test_hostile.py`` has them over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from penstock.online.server.access.gate import Gate, Passage
from penstock.online.server.http.body_gate import BodyGate
from penstock.online.server.http.context import HttpContext

LIMIT = 1 << 20


class Context:
    """As much of a context as a wait uses; ``ended`` waits for its tasks."""

    def __init__(self) -> None:
        self.budget = SimpleNamespace(gate=Gate(LIMIT, aside=0))
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def ended(self) -> None:
        await asyncio.gather(*self.tasks)


def test_a_body_waits_for_room_and_then_counts() -> None:
    async def run() -> None:
        context, opened = Context(), asyncio.Event()
        gate = context.budget.gate
        first, body = Passage(gate), BodyGate()
        await first.hold(LIMIT)
        body.wait(cast(HttpContext, context), LIMIT, opened.set)
        await asyncio.sleep(0)
        assert body.is_closed
        assert not opened.is_set()
        first.leave()
        await opened.wait()
        assert not body.is_closed
        passage = body.take()
        assert passage is not None
        assert passage.is_parked
        assert (passage.size, gate.used) == (LIMIT, LIMIT)
        assert not body.is_used
        passage.leave()
        assert gate.used == 0

    asyncio.run(run())


def test_a_wait_that_ends_early_leaves_nothing_and_opens_nothing() -> None:
    async def run() -> None:
        context, opened = Context(), asyncio.Event()
        gate = context.budget.gate
        first = Passage(gate)
        await first.hold(LIMIT)
        for is_complete in (False, True):
            body = BodyGate()
            body.wait(cast(HttpContext, context), LIMIT, opened.set)
            await asyncio.sleep(0)
            assert gate.waiting == 1
            if is_complete:
                assert body.take() is None
            else:
                body.leave()
            assert not body.is_closed
            assert not body.is_used
            await context.ended()
            assert (gate.waiting, gate.used) == (0, LIMIT)
        first.leave()
        assert gate.used == 0
        assert not opened.is_set()

    asyncio.run(run())
