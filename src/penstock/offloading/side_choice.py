"""The knowledge about both sides, and the decisions that follow from it."""

from __future__ import annotations

import math

from penstock.offloading.choice import Outlook, Plan, Side, choose, latest_s, probe_due, retry_after
from penstock.offloading.estimate import Estimate


class SideChoice:
    """Where calls run. Runs nothing itself, and reads no clock: all times are passed in, in seconds. Not thread-safe."""

    def __init__(self) -> None:
        self.server_error = ""
        """Why the server is not used now; empty if it is."""
        self._times = {side: Estimate() for side in Side}
        self._newest: dict[Side, float | None] = dict.fromkeys(Side)
        """The seconds of each side's newest call."""
        self._last = dict.fromkeys(Side, -math.inf)
        """When each side last ran a call."""
        self._failures = 0
        self._blocked_until = -math.inf

    def plan(self, size: int, deadline_s: float | None = None, spare_device: bool = False) -> Plan:
        """Where a call of ``size`` bytes runs."""
        return choose(Outlook(*self.predicted(size), not self.server_error, deadline_s, spare_device))

    def predicted(self, size: int) -> tuple[float | None, float | None]:
        """The predicted seconds of a call of ``size`` bytes on the device, and if it is sent to the server; None before the first."""
        return self._times[Side.DEVICE].seconds(size), self._times[Side.SERVER].seconds(size)

    def is_probe_due(self, side: Side, now: float) -> bool:
        """True if the ``side`` that does not answer should run the call as well."""
        due = probe_due(now - self._last[side], self._newest[side], self._times[side].calls)
        return due and (side is Side.DEVICE or now >= self._blocked_until)

    def started(self, side: Side, now: float) -> None:
        self._last[side] = now

    def measured(self, side: Side, size: int, seconds: float, now: float) -> None:
        """Record a call. A call to the server counts at most as long as its caller would wait before the device has answered."""
        self._newest[side], self._last[side] = seconds, now
        device, server = self.predicted(size)
        if side is Side.SERVER and device is not None and server is not None:
            seconds = min(seconds, latest_s(server) + device)
        self._times[side].add(size, seconds)

    def answered(self) -> None:
        """The server has answered: forget earlier failures, unless it is blocked forever."""
        if self._blocked_until < math.inf:
            self._failures, self.server_error = 0, ""

    def failed(self, error: str, now: float, *, forever: bool = False) -> None:
        """Do not use the server for a while, or ``forever``."""
        self._failures += 1
        self.server_error = error
        if self._blocked_until < math.inf:
            self._blocked_until = math.inf if forever else now + retry_after(self._failures)
