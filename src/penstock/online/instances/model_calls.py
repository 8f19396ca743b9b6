"""Calls from one model to another. Any thread may make a call. The answer arrives on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from penstock.errors import Unavailable
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest


class StartCall(Protocol):
    """The type of ``DataPlane.call``. Such a function must be called on the event loop."""

    def __call__(self, request: InferRequest, done: Done, *, decoupled: bool) -> Cancellable | None: ...


class ModelCall:
    """One call of a model. Call ``begin`` once. Any thread may use the object."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: StartCall) -> None:
        self._loop = loop
        self._call = call
        # The other attributes are used only on the event loop.
        self._cancelled = False
        self._request: Cancellable | None = None

    def begin(self, request: InferRequest, done: Done, decoupled: bool) -> None:
        """Send ``request``. ``done`` is called on the event loop and must not block. Raises Unavailable."""

        def start() -> None:
            if not self._cancelled:
                self._request = self._call(request, done, decoupled=decoupled)

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError:
            raise Unavailable("the server is shutting down") from None

    def cancel(self) -> None:
        """Cancel the call, unless it has ended. Idempotent."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._request is not None:
            self._request.cancel()


MakeCall = Callable[[], ModelCall]
