"""Battery and memory, from the files of the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.offloading.device import battery_share, free_memory


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(f"{text}\n")


def test_the_emptiest_battery_counts(tmp_path: Path) -> None:
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="80")
    supply(tmp_path, "BAT1", type="Battery", status="Discharging", capacity="15")
    assert battery_share(tmp_path) == 0.15


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging"])
def test_a_device_on_mains_power_is_not_spared(status: str, tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status=status, capacity="5")
    assert battery_share(tmp_path) is None


def test_an_unknown_charge_is_none(tmp_path: Path) -> None:
    assert battery_share(tmp_path / "missing") is None
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="?")
    supply(tmp_path, "BAT1", type="Battery", status="Discharging")
    assert battery_share(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   2048 kB\n", 2 << 20),
        ("MemTotal: 9 kB\n", None),
        ("MemAvailable:\n", None),
        ("MemAvailable: much kB\n", None),
    ],
)
def test_free_memory(text: str, found: int | None, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert free_memory(tmp_path / "meminfo") == found


def test_a_system_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "meminfo") is None
