"""An event loop whose time passes only when nothing else is left to do, and then at once; its executor is the caller's thread."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_TICK_S = 1e-6


class FastLoop(asyncio.SelectorEventLoop):
    """Every run on it takes the same turns. ``now`` makes it a ``Clock``."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Selector(self))
        # The system's is too small for numbers as large as this clock comes to: what is due now would never be.
        self._clock_resolution = _TICK_S
        self.failures: list[dict[str, Any]] = []
        """What callbacks and tasks raised that nobody caught."""
        self.set_exception_handler(lambda _, context: self.failures.append(context))
        self.set_default_executor(_Inline())

    def time(self) -> float:
        return self.now_s

    now = time


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: FastLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return []
        events: list[Any] = super().select(0)
        if events:
            return events
        if timeout is None:
            raise AssertionError("everybody waits for something that will never happen")
        # At least so much that the sum is another number, however late it is.
        self._loop.now_s += max(timeout, _TICK_S)
        return []


class _Inline(ThreadPoolExecutor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future
