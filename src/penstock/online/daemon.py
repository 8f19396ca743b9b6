"""Blocking work beside the event loop, on threads that, unlike an executor's, cannot keep the process from ending."""

from __future__ import annotations

import threading
from asyncio import Future, wrap_future
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

_Result = TypeVar("_Result")


def on_daemon_thread(name: str, work: Callable[[], _Result]) -> Future[_Result]:
    """The result of ``work()``, on a thread called ``name`` that ends with the process at the latest."""
    future: futures.Future[_Result] = futures.Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed on to the waiting caller
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return wrap_future(future)
