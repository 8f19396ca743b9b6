"""Calls of other models, from other threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.errors import Unavailable
from penstock.online.instances.model_calls import ModelCall
from penstock.request import Done, InferRequest

REQUEST = InferRequest("net", {})


class Plane:
    """Notes what it is asked, and on which thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[InferRequest, bool, int]] = []
        self.cancelled = 0

    def __call__(self, request: InferRequest, done: Done, *, decoupled: bool) -> Any:
        self.asked.append((request, decoupled, threading.get_ident()))
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def ignore(*told: object) -> None:
    """The outcome does not matter."""


def test_another_threads_call_starts_and_ends_on_the_loop() -> None:
    plane = Plane()

    async def run() -> None:
        call = ModelCall(asyncio.get_running_loop(), plane)
        await asyncio.to_thread(call.begin, REQUEST, ignore, True)
        await asyncio.to_thread(call.cancel)
        await asyncio.sleep(0)
        assert plane.asked == [(REQUEST, True, threading.get_ident())]
        assert plane.cancelled == 1

    asyncio.run(run())


def test_a_call_that_was_cancelled_before_is_not_made() -> None:
    plane = Plane()

    async def run() -> None:
        call = ModelCall(asyncio.get_running_loop(), plane)
        call.cancel()
        call.begin(REQUEST, ignore, False)
        await asyncio.sleep(0)
        assert not plane.asked

    asyncio.run(run())


def test_a_closed_loop_is_a_server_that_shuts_down() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call = ModelCall(loop, Plane())
    with pytest.raises(Unavailable, match="the server is shutting down"):
        call.begin(REQUEST, ignore, False)
    call.cancel()
