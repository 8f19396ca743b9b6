"""The load of the machine during a measurement, by the kernel's counters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.clock import Clock, SystemClock
from penstock.measurement import Conditions
from penstock.resources import core_ids

_PROC = Path("/proc")
_SYSTEM_CLOCK = SystemClock()
_DIRTY_STEAL_PERCENT = 5.0
_DIRTY_LOAD_PER_CORE = 1.5
_BUSY_SHARE = 0.25
"""A measurement is disturbed if other processes use more than this share of the cores."""


class ConditionsWatch:
    """Measures load and steal time from construction to ``finish``."""

    def __init__(self, cores: int, proc: Path = _PROC) -> None:
        self._cores, self._proc = cores, proc
        self._load = _load(proc)
        self._steal, self._total = _steal(proc)

    def finish(self) -> Conditions:
        """The machine's load since construction. A load of up to one busy process per core counts as undisturbed."""
        load = _load(self._proc)
        steal, total = _steal(self._proc)
        percent = 100 * (steal - self._steal) / max(1, total - self._total)
        dirty = percent > _DIRTY_STEAL_PERCENT or self._load > _DIRTY_LOAD_PER_CORE * self._cores
        return Conditions(round(self._load, 2), round(load, 2), round(percent, 2), dirty)


class OthersWatch:
    """Measures the CPU time that other processes use on this process's cores, from construction to ``finish``.

    Child processes of this process count as other processes until they have ended.
    """

    def __init__(self, cores: Sequence[int] = (), proc: Path = _PROC, clock: Clock = _SYSTEM_CLOCK) -> None:
        self._cores, self._proc, self._clock = cores or core_ids(), proc, clock
        self._start, self._used = clock.now(), self._others()

    def finish(self) -> str:
        """The CPU use of other processes as text, if it may have disturbed a measurement; otherwise empty."""
        cores, seconds = len(self._cores), self._clock.now() - self._start
        others = (self._others() - self._used) / max(seconds, 1e-6)
        return f"other processes used {others:.1f} of {cores} cores" if others > _BUSY_SHARE * cores else ""

    def _others(self) -> float:
        """CPU seconds of other processes since boot; constant if the kernel does not report them."""
        times = _cpu_times(self._proc)
        jiffies = sum(_busy(times[f"cpu{core}"]) for core in self._cores if f"cpu{core}" in times)
        own = os.times()
        used = own.user + own.system + own.children_user + own.children_system
        return jiffies / os.sysconf("SC_CLK_TCK") - used if jiffies else 0.0


def _load(proc: Path) -> float:
    """Load average of the last minute."""
    try:
        return float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]


def _steal(proc: Path) -> tuple[int, int]:
    """Jiffies stolen by other guests and all jiffies since boot; zeros if the kernel does not report them."""
    fields = _cpu_times(proc).get("cpu", [])
    return (fields[7] if len(fields) > 7 else 0), sum(fields[:8])


def _busy(fields: Sequence[int]) -> int:
    """The jiffies in which a CPU ran a process, also one of another guest."""
    return sum(fields[:8]) - sum(fields[3:5])


def _cpu_times(proc: Path) -> dict[str, list[int]]:
    """The counters of each CPU and of all together; empty if the kernel does not report them."""
    try:
        rows = [line.split() for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
        return {row[0]: [int(field) for field in row[1:]] for row in rows}
    except (OSError, ValueError):
        return {}
