"""Runs decoding and encoding of more than a few KiB in short steps on other threads, to keep the event loop free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

_Result = TypeVar("_Result")

INLINE_BYTES = 4 << 10
"""Texts of at most this number of bytes are decoded or encoded on the event loop, because switching threads takes longer."""
STEP_BYTES = 1 << 20
"""Maximum bytes of memory that one step fills. Steps of this size are short, so that several clients can take turns."""

Steps = Generator[int, None, _Result]
"""Work in short steps. Each ``yield`` gives the number of bytes that the work may hold after its next step. The code before the
first ``yield`` takes negligible time and memory."""


async def run(work: Callable[[], _Result]) -> _Result:
    """Run ``work()`` on another thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def in_steps(
    steps: Steps[_Result],
    charge: Callable[[int], Awaitable[None]],
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> _Result:
    """Run each of ``steps`` on another thread, and return the result.

    Each step queues separately for a thread, so that short work overtakes long work. Before each step, the event loop calls
    ``charge`` with the bytes that the work may then hold. The step runs inside ``turn()``. An exception from ``charge`` or ``turn``
    ends the work.
    """
    size, result = _advance(steps)
    while result is None:
        await charge(size)
        async with turn():
            size, result = await asyncio.get_running_loop().run_in_executor(None, _advance, steps)
    return result[0]


def beside(held: int, steps: Steps[_Result]) -> Steps[_Result]:
    """``steps``, with ``held`` added to each size. ``held`` counts other bytes that stay in memory during the work."""
    size, result = _advance(steps)
    while result is None:
        yield held + size
        size, result = _advance(steps)
    return result[0]


def finish(steps: Steps[_Result]) -> _Result:
    """Run all ``steps`` now, and return their result."""
    result = None
    while result is None:
        result = _advance(steps)[1]
    return result[0]


def _advance(steps: Steps[_Result]) -> tuple[int, tuple[_Result] | None]:
    """Run one step. Returns the number of bytes that the next step needs, or the result in a tuple."""
    try:
        return next(steps), None
    except StopIteration as end:
        return 0, (end.value,)
