"""Battery and memory of this device."""

from __future__ import annotations

from pathlib import Path

_SUPPLIES = Path("/sys/class/power_supply")
_MEMORY = Path("/proc/meminfo")


def battery_share(supplies: Path = _SUPPLIES) -> float | None:
    """Charge of the battery from 0 to 1 while it is discharging; None on mains power, without a battery, and if it is not known."""
    shares = []
    for supply in supplies.glob("*"):
        try:
            if (supply / "type").read_text().strip() == "Battery":
                if (supply / "status").read_text().strip() != "Discharging":
                    return None
                shares.append(int((supply / "capacity").read_text()) / 100)
        except (OSError, ValueError):
            continue
    return min(shares, default=None)


def free_memory(path: Path = _MEMORY) -> int | None:
    """Bytes of memory that programs can still allocate; None if the system does not say it."""
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
