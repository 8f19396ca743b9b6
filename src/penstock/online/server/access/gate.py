"""The gate for large requests. It limits the memory for decoding and encoding, over all transports.

A request enters the gate before it holds more than ``SMALL_BYTES`` of decoded or encoded data. It leaves the gate when its response
is sent. Requests that do not fit wait outside, in order of arrival. A request outside holds only the data that the server has
received for it. Part of the memory is set aside for requests of moderate size, so that they need not wait for larger requests.

No request waits for ever:

1. The oldest request inside may always take more memory, even beyond the limit. Requests larger than the limit are therefore
   processed as well.
2. A request inside waits only for the gate, its model, or a thread. Every step on a thread ends. A model may need a request that
   still waits outside, such as the next request of a sequence. Therefore, after ``patience_s`` seconds without progress, the gate
   stops counting the memory of requests that wait for their models.
3. A request outside holds no resource that another request needs.
"""

from __future__ import annotations

import asyncio

from penstock.errors import Cancelled

SMALL_BYTES = 256 << 10
"""Requests that hold at most this number of bytes do not need the gate."""
LIMIT_BYTES = 24 << 20
ASIDE_BYTES = 8 << 20
"""Bytes in addition to ``LIMIT_BYTES``, for requests of at most ``ASIDE_BYTES / 4`` bytes each."""
_PATIENCE_S = 1.0


class Gate:
    """Limits the bytes that all large requests hold. Each request has a ``Passage``. Used only on the event loop."""

    def __init__(self, limit: int = LIMIT_BYTES, patience_s: float = _PATIENCE_S, aside: int = ASIDE_BYTES) -> None:
        self.used = 0
        """Bytes that all requests inside hold. The oldest request, or the outputs of models, may exceed the limit."""
        self._limit = limit
        self._aside = aside
        self._moderate = aside // 4
        self._patience_s = patience_s
        self._inside: dict[Passage, None] = {}
        self._growing: dict[Passage, int] = {}  # requests inside that wait, and the bytes that each waits to hold
        self._outside: dict[Passage, int] = {}  # requests that wait to enter, with the bytes that they need
        self._moderate_outside: dict[Passage, None] = {}  # the requests of moderate size in _outside
        self._moderate_used = 0  # bytes of the requests inside that are of moderate size
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._growing) + len(self._outside)

    async def wait(self, passage: Passage, size: int) -> None:
        """Wait until the request of ``passage`` may hold a total of ``size`` bytes, then count them."""
        row = self._growing if passage in self._inside else self._outside
        row[passage] = size
        if row is self._outside and size <= self._moderate:
            self._moderate_outside[passage] = None
        self._admit()
        if passage not in row:
            return
        passage.admitted = asyncio.get_running_loop().create_future()
        try:
            await passage.admitted
        finally:
            passage.admitted = None
            self._moderate_outside.pop(passage, None)
            if row.pop(passage, None) is not None:
                self._admit()

    def count(self, passage: Passage, size: int) -> None:
        """Record that ``passage`` now holds ``size`` bytes. It is inside the gate unless ``size`` is 0."""
        self._set(passage, size)
        self._admit()

    def _set(self, passage: Passage, size: int) -> None:
        self.used += size - passage.size
        self._moderate_used += self._if_moderate(size) - self._if_moderate(passage.size)
        passage.size = size
        if not size:
            self._inside.pop(passage, None)
        elif passage not in self._inside:
            self._inside[passage] = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> None:
        """Let all requests continue that fit. Requests inside go first. Requests outside then enter in order.

        The time does not depend on the number of requests outside, because a client can send thousands of them.
        """
        for passage, size in list(self._growing.items()):
            if self._fits(passage, size) or next(iter(self._inside)) is passage:
                self._let(passage, self._growing)
        while self._outside and not self._growing:
            passage, size = next(iter(self._outside.items()))
            if self._inside and not self._fits(passage, size):
                break
            self._let(passage, self._outside)
        while self._moderate_outside:
            passage = next(iter(self._moderate_outside))
            if not self._fits_aside(passage, self._outside[passage]):
                break
            self._let(passage, self._outside)
        if self._timer is None and self.waiting:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._lose_patience)

    def _fits(self, passage: Passage, size: int) -> bool:
        return self.used - passage.size + size <= self._limit or self._fits_aside(passage, size)

    def _fits_aside(self, passage: Passage, size: int) -> bool:
        """True if a request of moderate size fits into the memory that is set aside for such requests."""
        others = self._moderate_used - self._if_moderate(passage.size)
        return size <= self._moderate and others + size <= self._aside

    def _if_moderate(self, size: int) -> int:
        return size if size <= self._moderate else 0

    def _let(self, passage: Passage, row: dict[Passage, int]) -> None:
        self._moderate_outside.pop(passage, None)
        self._set(passage, row.pop(passage))
        if passage.admitted is not None and not passage.admitted.done():
            passage.admitted.set_result(None)

    def _lose_patience(self) -> None:
        self._timer = None
        for passage in [passage for passage in self._inside if passage.is_parked]:
            self._set(passage, 0)
        self._admit()


class Passage:
    """Counts the bytes of one request inside the gate. A request has at most one step in progress. Used only on the event loop."""

    __slots__ = ("_gate", "_is_cancelled", "admitted", "is_parked", "size")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._is_cancelled = False
        self.size = 0
        """Bytes that the gate counts for the request; 0 if the request is small or outside."""
        self.is_parked = False
        """True while the request waits for its model."""
        self.admitted: asyncio.Future[None] | None = None
        """Completed when the gate admits the request; None while the request does not wait for the gate."""

    async def hold(self, size: int) -> None:
        """Wait until the request may hold a total of ``size`` bytes. Raises Cancelled after ``cancel``."""
        if self._is_cancelled:
            raise _cancelled()
        self.is_parked = False
        if size > max(self.size, SMALL_BYTES):
            await self._gate.wait(self, size)

    def note(self, size: int) -> None:
        """Count ``size`` bytes that are already in memory. Does not wait."""
        self.is_parked = False
        size = size if size > SMALL_BYTES else 0
        if size != self.size:
            self._gate.count(self, size)

    def park(self, size: int) -> None:
        """Count ``size`` bytes while the request waits for its model."""
        self.note(size)
        self.is_parked = True

    def leave(self) -> None:
        """Leave the gate. Idempotent."""
        self.note(0)

    def cancel(self) -> None:
        """Make the current wait and all later waits raise Cancelled. The request's bytes remain counted until ``leave`` is called."""
        self._is_cancelled = True
        if self.admitted is not None and not self.admitted.done():
            self.admitted.set_exception(_cancelled())


def _cancelled() -> Cancelled:
    return Cancelled("the client has disconnected")
