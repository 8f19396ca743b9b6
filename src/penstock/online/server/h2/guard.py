"""Limits the frames of one HTTP/2 connection that cause work but do not advance a call."""

from __future__ import annotations

from collections.abc import Callable

from penstock.clock import Clock
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

BURST = 4000
RATE_PER_S = 400.0
CALL = 4
"""Cost of a wasted call. Each response adds the same amount to the allowance, because clients may send WINDOW_UPDATE and PING for
each response."""
_EARNING_BYTES = 1 << 12


class FloodGuard:
    """Limits control and unknown frames, frames with little or no data, empty messages, and frames on closed streams.

    These frames use up an allowance. A call that the client resets ("rapid reset", CVE-2023-44487), or that the server resets
    because of an error, costs ``CALL``. The allowance refills with time and with each response. A client that cancels at most as
    many calls as it completes never uses up the allowance.
    """

    __slots__ = ("_clock", "_left", "_since", "_written", "_written_before", "earned")

    def __init__(self, clock: Clock, written: Callable[[], int] = lambda: 0) -> None:
        """``written`` returns the bytes sent to the client so far."""
        self._clock = clock
        self._written = written
        self._written_before = 0
        self._left = BURST
        self._since = clock.now()
        self.earned = 0
        """Callers increase this number for progress. The next charge adds it to the allowance, up to ``BURST``."""

    def charge(self, count: int = 1) -> None:
        """Charge ``count`` to the allowance. Raises ConnectionFault once it is used up."""
        self._left = min(BURST, self._left + self.earned) - count
        self.earned = 0
        if self._left < 0:
            self._refill()
            if self._left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do not advance a call")

    def _refill(self) -> None:
        now, written = self._clock.now(), self._written()
        earned = int((now - self._since) * RATE_PER_S) + (written - self._written_before) // _EARNING_BYTES
        self._left += min(BURST, earned)
        self._since, self._written_before = now, written
