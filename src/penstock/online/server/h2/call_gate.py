"""Makes one call wait at the gate for large requests, before its message is received and again before the message is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from penstock.errors import Cancelled
from penstock.online.server.access.gate import Gate, Passage


class CallGate:
    """Delays a large message: the client's window is enlarged only once the gate has room. Used only on the event loop."""

    __slots__ = ("_gate", "_message_bytes", "_passage", "_task", "is_waiting")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._passage = Passage(gate)
        self._message_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.is_waiting = False
        """True while a message waits for the gate. Meanwhile, the client's window must not be enlarged."""

    def admits(self, size: int, on_open: Callable[[], None]) -> bool:
        """True if a message of ``size`` bytes may be received now. If not, ``on_open`` is called later, unless the call ends."""
        if self._message_bytes >= size:
            return True
        if not self.is_waiting:
            self.is_waiting = True
            self._task = asyncio.get_running_loop().create_task(self._enter(self._passage, size, on_open))
        return False

    async def _enter(self, passage: Passage, size: int, on_open: Callable[[], None]) -> None:
        with suppress(Cancelled):
            await passage.hold(size)
        if passage is not self._passage:
            passage.leave()
            return
        self.is_waiting, self._message_bytes = False, size
        passage.park(size)  # from here on, the call waits for its client
        on_open()

    async def hold(self, size: int) -> None:
        """Wait until the call may hold ``size`` bytes in addition to its message. Raises Cancelled."""
        await self._passage.hold(self._message_bytes + size)

    def park(self, size: int) -> None:
        """Count ``size`` bytes in addition to the message while the call waits for its model or its client."""
        self._passage.park(self._message_bytes + size)

    def leave(self) -> None:
        """Release all bytes, and stop waiting. Idempotent."""
        self._message_bytes = 0
        if self.is_waiting:
            self.is_waiting = False
            passage, self._passage = self._passage, Passage(self._gate)
            passage.cancel()
        else:
            self._passage.leave()
