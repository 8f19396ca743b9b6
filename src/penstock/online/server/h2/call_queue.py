"""Queues the calls of one HTTP/2 connection when its client has used up its share of work or memory.

Each turn of the connection has a limited number of units of work. Calls wait for these units. Unary calls also wait while the
client leaves too many bytes of responses unread. All calls wait while too many bytes of the client's messages are being decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from penstock.online.server.access.gate import SMALL_BYTES
from penstock.online.server.h2.headers import CallHead
from penstock.online.server.network.turns import SLICE_UNITS
from penstock.online.server.network.unread import Unread

OCCUPIED_BYTES = 8 * SMALL_BYTES
"""While this number of bytes or more is being decoded, no further messages are delivered."""


class WaitingCall(Protocol):
    """The queue's view of a stream."""

    @property
    def id(self) -> int: ...

    @property
    def head(self) -> CallHead: ...

    @property
    def receiver(self) -> object | None:
        """None if the call is unary."""

    @property
    def gone(self) -> bool: ...

    def go_on(self) -> None:
        """Deliver waiting messages. This calls ``CallQueue.admits`` again for each message."""


def _ignore() -> None:
    pass


class CallQueue:
    """Used only on the event loop."""

    __slots__ = ("_continue_later", "_lone", "_max_unsent_bytes", "_occupied", "_unread", "_waiting", "held", "units")

    def __init__(self, unread: Unread, max_unsent_bytes: int, continue_later: Callable[[], None]) -> None:
        """``continue_later`` schedules a call of ``go_on``, with more units, for a later event-loop iteration."""
        self.units = 0
        """Units of work left in this turn; see ``Turns``."""
        self._unread = unread
        self._max_unsent_bytes = max_unsent_bytes
        self._continue_later = continue_later
        self._occupied = 0  # bytes of messages that are being decoded
        self._waiting: OrderedDict[int, WaitingCall] = OrderedDict()  # for units
        self.held: OrderedDict[int, WaitingCall] = OrderedDict()
        """Calls that wait for memory. Call ``wake`` whenever more memory may be available."""
        self._lone: WaitingCall | None = None  # the one unary call that runs although too many bytes are unread

    def admits(self, call: WaitingCall) -> bool:
        """True if ``call`` may deliver a message now. Otherwise, ``go_on`` continues it later."""
        units = call.head.units
        if self.units >= units and self._unread.count < self._max_unsent_bytes and self._occupied < OCCUPIED_BYTES:
            self.units -= units
            return True
        is_unary = call.receiver is None
        if self.is_occupied or (is_unary and self._is_full):
            self.held[call.id] = call
            return False
        if self.units < min(units, SLICE_UNITS):
            self._waiting[call.id] = call
            self._continue_later()
            return False
        self.units -= units
        if is_unary:
            self._lone = call
        return True

    def go_on(self) -> None:
        """Continue waiting calls while units are left."""
        while self._waiting and self.units > 0:
            call = self._waiting.popitem(last=False)[1]
            call.go_on()
            if call.id in self._waiting:
                break
        while self._may_start and self.units > 0 and not self._waiting:
            self.held.popitem(last=False)[1].go_on()
        if self._waiting or self._may_start:
            self._continue_later()

    def wake(self) -> None:
        """Reconsider the calls that wait for memory."""
        if self.held:
            self._continue_later()

    def waits_for_units(self, call: WaitingCall) -> bool:
        return call.id in self._waiting

    def remove(self, call: WaitingCall) -> None:
        """Forget ``call``, which has ended early."""
        self._waiting.pop(call.id, None)
        self.held.pop(call.id, None)
        self.wake()

    def clear(self) -> None:
        """Forget all calls."""
        self._waiting.clear()
        self.held.clear()

    def release(self) -> None:
        """Drop the references to the connection, which is lost."""
        self._continue_later, self._lone = _ignore, None

    @property
    def is_occupied(self) -> bool:
        """True while too many bytes of the client's messages are being decoded. No more bytes are then read."""
        return self._occupied >= OCCUPIED_BYTES

    def occupy(self, size: int) -> None:
        """See ``GrpcCall``."""
        before = self.is_occupied
        self._occupied += max(size, SMALL_BYTES) if size > 0 else min(size, -SMALL_BYTES)
        if self.is_occupied != before:
            self._continue_later()

    @property
    def _is_full(self) -> bool:
        """True if no unary call may start: too many bytes are unread, and ``_lone``, the one call that may still run, is open."""
        lone = self._lone
        return self._unread.count >= self._max_unsent_bytes and lone is not None and not lone.gone

    @property
    def _may_start(self) -> bool:
        return bool(self.held) and not (self._is_full or self.is_occupied)
