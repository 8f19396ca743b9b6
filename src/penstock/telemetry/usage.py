"""Resource usage of the process and the machine, read from ``/proc``. On systems without ``/proc``, values are unknown."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec


class ProcessUsage(msgspec.Struct):
    """Resource usage of one process, or the sum over several processes."""

    resident_bytes: int = 0
    cpu_s: float = 0.0
    open_files: int = 0


class MachineUsage(msgspec.Struct):
    """Usage of the whole machine."""

    memory_total_bytes: int
    memory_used_bytes: int
    cpu: float | None = None
    """Fraction of all cores' time that was in use since the last reading, from 0 to 1; None at the first reading."""


def process_usage() -> ProcessUsage:
    """Usage of this process."""
    usage = ProcessUsage(cpu_s=time.process_time())
    try:
        usage.resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        usage.open_files = len(os.listdir("/proc/self/fd")) - 1  # one of the entries is the listing itself
    except OSError:
        pass
    return usage


class MachineMeter:
    """Reads the machine's usage. Keeps the previous reading, because the kernel's counters start at boot."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last: tuple[int, int] | None = None

    def read(self) -> MachineUsage | None:
        """The usage now; None if the kernel does not provide it."""
        try:
            lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
            memory = {words[0]: int(words[1]) * 1024 for words in lines}
            # user nice system idle iowait irq softirq steal; guest time, which follows, is within user's
            ticks = [int(word) for word in (self._proc / "stat").read_text().partition("\n")[0].split()[1:9]]
            total = memory["MemTotal:"]
            usage = MachineUsage(total, total - memory["MemAvailable:"])
            now = sum(ticks), ticks[3] + ticks[4]
        except (OSError, ValueError, LookupError):
            return None
        if self._last is not None and now[0] > self._last[0]:
            usage.cpu = 1 - (now[1] - self._last[1]) / (now[0] - self._last[0])
        self._last = now
        return usage
