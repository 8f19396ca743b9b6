"""The gate for large requests: bounds the memory that decoding and encoding take at once, over all transports.

A request enters the gate once it is about to hold more than ``SMALL_BYTES`` of decoded or encoded data, and leaves it with its answer.
Requests that do not fit wait in the order in which they asked, in the size in which they were sent.

Every request that waits continues in the end:

1. The request that has been inside longest may always hold more. So a request larger than the limit is worked on too, while no other
   grows.
2. A request inside waits only for the gate, for threads, which finish their steps, or for its model. A model may depend on a request
   that waits, such as the next one of a sequence. So once no request has moved for ``patience_s``, those that wait for their models
   no longer count.
3. A request outside holds nothing that another one waits for.
"""

from __future__ import annotations

import asyncio

from penstock.errors import Cancelled

SMALL_BYTES = 256 << 10
"""Requests that hold at most this much do not pass the gate."""
LIMIT_BYTES = 24 << 20
_PATIENCE_S = 1.0


class Gate:
    """Bounds the bytes that all large requests hold; each has a ``Passage``. Belongs to the event loop."""

    def __init__(self, limit: int = LIMIT_BYTES, patience_s: float = _PATIENCE_S) -> None:
        self.used = 0
        """Bytes that the requests inside hold. Exceeds the limit while the oldest of them is larger, or outputs of models are."""
        self._limit = limit
        self._patience_s = patience_s
        self._inside: dict[Passage, None] = {}
        self._growing: dict[Passage, int] = {}  # those inside that wait to hold so many bytes
        self._outside: dict[Passage, int] = {}  # those that wait to enter with so many bytes
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._growing) + len(self._outside)

    async def wait(self, passage: Passage, size: int) -> None:
        """Wait until ``passage`` may hold ``size`` bytes in all, and count them."""
        row = self._growing if passage in self._inside else self._outside
        row[passage] = size
        self._admit()
        if passage not in row:
            return
        passage.admitted = asyncio.get_running_loop().create_future()
        try:
            await passage.admitted
        finally:
            passage.admitted = None
            if row.pop(passage, None) is not None:
                self._admit()

    def count(self, passage: Passage, size: int) -> None:
        """Count ``size`` bytes for ``passage``, which is inside with more than 0 of them and outside with 0."""
        self._set(passage, size)
        self._admit()

    def _set(self, passage: Passage, size: int) -> None:
        self.used += size - passage.size
        passage.size = size
        if not size:
            self._inside.pop(passage, None)
        elif passage not in self._inside:
            self._inside[passage] = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> None:
        """Let all requests continue that may: those inside before those outside, which enter in order."""
        for passage, size in list(self._growing.items()):
            if self._fits(passage, size) or next(iter(self._inside)) is passage:
                self._let(passage, self._growing)
        while self._outside and not self._growing:
            passage, size = next(iter(self._outside.items()))
            if self._inside and not self._fits(passage, size):
                break
            self._let(passage, self._outside)
        if self._timer is None and self.waiting:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def _fits(self, passage: Passage, size: int) -> bool:
        return self.used - passage.size + size <= self._limit

    def _let(self, passage: Passage, row: dict[Passage, int]) -> None:
        self._set(passage, row.pop(passage))
        if passage.admitted is not None and not passage.admitted.done():
            passage.admitted.set_result(None)

    def _lose_patience(self) -> None:
        self._timer = None
        for passage in [passage for passage in self._inside if passage.is_parked]:
            self._set(passage, 0)
        self._admit()


class Passage:
    """The bytes that one request holds inside the gate. A request has at most one step under way. Belongs to the event loop."""

    __slots__ = ("_gate", "_is_cancelled", "admitted", "is_parked", "size")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._is_cancelled = False
        self.size = 0
        """Bytes counted; 0 while the request is small, or outside."""
        self.is_parked = False
        """True while the request waits for its model."""
        self.admitted: asyncio.Future[None] | None = None
        """Set while the request waits for the gate."""

    async def hold(self, size: int) -> None:
        """Wait until the request may hold ``size`` bytes in all. Raises Cancelled after ``cancel``."""
        if self._is_cancelled:
            raise _cancelled()
        self.is_parked = False
        if size > max(self.size, SMALL_BYTES):
            await self._gate.wait(self, size)

    def note(self, size: int) -> None:
        """Count ``size`` bytes, all of which exist already, without waiting."""
        self.is_parked = False
        size = size if size > SMALL_BYTES else 0
        if size != self.size:
            self._gate.count(self, size)

    def park(self, size: int) -> None:
        """Count ``size`` bytes while the request waits for its model."""
        self.note(size)
        self.is_parked = True

    def leave(self) -> None:
        """Hold nothing. Idempotent."""
        self.note(0)

    def cancel(self) -> None:
        """End a wait, and every later one, with Cancelled. What the request holds counts until it leaves."""
        self._is_cancelled = True
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_exception(_cancelled())


def _cancelled() -> Cancelled:
    return Cancelled("the client has disconnected")
