"""Lets a connection receive a large body only once the gate for large requests has room for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from penstock.errors import Cancelled
from penstock.online.server.access.gate import Passage
from penstock.online.server.http.context import HttpContext


class BodyGate:
    """Makes one connection wait for the gate. Its requests arrive one after the other. Used only on the event loop."""

    __slots__ = ("_passage", "is_closed")

    def __init__(self) -> None:
        self.is_closed = False
        """True while a body waits for the gate, so that the connection must not read."""
        self._passage: Passage | None = None

    @property
    def is_used(self) -> bool:
        """True if the current body has to pass the gate."""
        return self._passage is not None

    def wait(self, context: HttpContext, size: int, on_open: Callable[[], None]) -> None:
        """Begin to wait for room for a body of up to ``size`` bytes. Then ``on_open`` is called, unless ``leave`` ends the wait."""
        self._passage = passage = Passage(context.budget.gate)
        self.is_closed = True
        context.start(self._enter(passage, size, on_open))

    def take(self) -> Passage | None:
        """Return the passage of the current body, or None if the body did not need the gate. Call this once the body is complete."""
        if self.is_closed:
            self.leave()
        passage, self._passage = self._passage, None
        return passage

    def leave(self) -> None:
        """End the wait and give up the passage. Idempotent."""
        passage, self._passage = self._passage, None
        self.is_closed = False
        if passage is not None:
            passage.cancel()
            passage.leave()

    async def _enter(self, passage: Passage, size: int, on_open: Callable[[], None]) -> None:
        with suppress(Cancelled):
            await passage.hold(size)
        if passage is not self._passage:
            passage.leave()
            return
        passage.park(size)  # from here on, the body waits for its client
        self.is_closed = False
        on_open()
