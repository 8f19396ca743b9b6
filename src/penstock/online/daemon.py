"""Runs blocking work on daemon threads. Unlike an executor's threads, daemon threads do not delay the exit of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


def on_daemon_thread(name: str, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Run ``work()`` on a daemon thread called ``name``, and return a future of its result.

    If the event loop closes first, the result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(settler: Callable[[], None]) -> None:
        if not future.done():  # it may be cancelled
            settler()

    def run() -> None:
        try:
            result = work()
            settler = partial(future.set_result, result)
        except BaseException as error:  # noqa: BLE001 - handed on to the waiting caller
            settler = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, settler)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
