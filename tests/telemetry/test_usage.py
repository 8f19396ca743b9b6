"""Resource usage of process and machine, from the kernel's files and from synthetic files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from penstock.telemetry.usage import MachineMeter, MachineUsage, process_usage


def test_memory_that_the_process_takes_is_seen() -> None:
    before = process_usage().resident_bytes
    with mmap.mmap(-1, 64 << 20) as memory:
        memory.write(b"x" * len(memory))
        assert process_usage().resident_bytes - before > 60 << 20


def test_files_and_processor_time_are_seen() -> None:
    before = process_usage()
    with open(os.devnull), open(os.devnull):
        after = process_usage()
    assert after.open_files == before.open_files + 2
    assert 0 < before.cpu_s <= after.cpu_s


def write(folder: Path, stat: str, available: int = 3) -> None:
    (folder / "stat").write_text(f"cpu  {stat}\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text(
        f"MemTotal:  10 kB\nMemFree: 1 kB\nMemAvailable:  {available} kB\nHugePages_Total: 0\n"
    )


def test_utilisation_is_what_was_not_idle_between_two_readings(tmp_path: Path) -> None:
    meter = MachineMeter(tmp_path)
    write(tmp_path, "100 0 100 700 100 0 0 0 55 0")
    assert meter.read() == MachineUsage(10 * 1024, 7 * 1024, None)
    write(tmp_path, "130 0 110 740 110 5 5 0 99 0", available=5)
    # 50 of 100 ticks were idle or waiting
    assert meter.read() == MachineUsage(10 * 1024, 5 * 1024, pytest.approx(0.5))


@pytest.mark.parametrize("stat", ["", "a b c d e f g h"])
def test_a_kernel_that_does_not_tell_gives_nothing(tmp_path: Path, stat: str) -> None:
    assert MachineMeter(tmp_path).read() is None
    write(tmp_path, stat)
    assert MachineMeter(tmp_path).read() is None


def test_this_machine() -> None:
    meter = MachineMeter()
    usage = meter.read()
    assert usage is not None
    assert 0 < usage.memory_used_bytes < usage.memory_total_bytes
