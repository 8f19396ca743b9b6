"""How much a client may do on one HTTP/2 connection that brings nothing forward."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

BURST = 1000
RATE_PER_S = 100.0


class FloodGuard:
    """An allowance for what costs work and asks for nothing: streams begun and reset ("rapid reset", CVE-2023-44487),
    PING, SETTINGS and PRIORITY, empty frames, frames on closed streams, faults that make us reset a stream.

    It refills with time and with every answered call, so a client that cancels no more than it lets finish never runs out.
    """

    __slots__ = ("_clock", "_left", "_since")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left = BURST
        self._since = clock.now()

    def earn(self) -> None:
        """A call has been answered."""
        if self._left < BURST:
            self._left += 1

    def charge(self) -> None:
        """The client did something of that kind. Raises ConnectionFault once it is too much."""
        self._left -= 1
        if self._left < 0:
            now = self._clock.now()
            self._left += min(BURST, int((now - self._since) * RATE_PER_S))
            self._since = now
            if self._left < 0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that ask for nothing")
