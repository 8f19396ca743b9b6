"""Requests that models make of models: from any thread, answered on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from penstock.errors import Unavailable
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest


class StartCall(Protocol):
    """``DataPlane.call``: belongs to the event loop."""

    def __call__(self, request: InferRequest, done: Done, *, decoupled: bool) -> Cancellable | None: ...


class ModelCall:
    """One request, begun once, and perhaps cancelled; on any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: StartCall) -> None:
        self._loop = loop
        self._call = call
        # The rest belongs to the loop.
        self._cancelled = False
        self._request: Cancellable | None = None

    def begin(self, request: InferRequest, done: Done, decoupled: bool) -> None:
        """Have ``request`` answered; ``done`` is called on the event loop, and must not block. Raises Unavailable."""
        self._on_loop(lambda: self._begin(request, done, decoupled))

    def cancel(self) -> None:
        """Idempotent, and of no effect after the last answer."""
        with suppress(Unavailable):
            self._on_loop(self._cancel)

    def _begin(self, request: InferRequest, done: Done, decoupled: bool) -> None:
        if not self._cancelled:
            self._request = self._call(request, done, decoupled=decoupled)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._request is not None:
            self._request.cancel()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise Unavailable("the server is ending") from None


MakeCall = Callable[[], ModelCall]
