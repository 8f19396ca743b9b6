"""Limits the frames of one HTTP/2 connection that cost work without advancing a call."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

BURST = 1000
RATE_PER_S = 100.0


class FloodGuard:
    """An allowance for streams that the client resets ("rapid reset", CVE-2023-44487), PING, SETTINGS and PRIORITY, empty
    frames, frames on closed streams, and faults for which the server resets a stream.

    It refills with time and with every answered call: a client that cancels at most as many calls as it completes never runs out.
    """

    __slots__ = ("_clock", "_left", "_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = BURST
        self._since = clock.now()

    def earn(self) -> None:
        """Note an answered call."""
        if self._left < BURST:
            self._left += 1

    def charge(self) -> None:
        """Note one such frame. Raises ConnectionFault once the allowance is used up."""
        self._left -= 1
        if self._left < 0:
            now = self._clock.now()
            self._left += min(BURST, int((now - self._since) * RATE_PER_S))
            self._since = now
            if self._left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that advance no call")
