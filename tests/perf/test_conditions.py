from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.clock import ManualClock
from penstock.perf.conditions import ConditionsWatch, OthersWatch

TIMES = "user", "system", "children_user", "children_system"


def proc(folder: Path, steal: int = 0, idle: int = 0, load: float = 0.5) -> Path:
    (folder / "stat").write_text(f"cpu  100 0 100 {1000 + idle} 0 0 0 {steal} 50 0\ncpu0 1 2 3\n")
    (folder / "loadavg").write_text(f"{load} 0.1 0.1 1/100 4242\n")
    return folder


def test_a_quiet_machine_is_clean(tmp_path: Path) -> None:
    watch = ConditionsWatch(2, proc(tmp_path))
    proc(tmp_path, steal=1, idle=999, load=2.5)
    conditions = watch.finish()
    assert (conditions.load_before, conditions.load_after) == (0.5, 2.5)
    assert conditions.steal_percent == pytest.approx(0.1)
    assert not conditions.dirty


def test_stolen_time_is_dirty(tmp_path: Path) -> None:
    watch = ConditionsWatch(2, proc(tmp_path))
    proc(tmp_path, steal=10, idle=90)
    conditions = watch.finish()
    assert conditions.steal_percent == pytest.approx(10)
    assert conditions.dirty


@pytest.mark.parametrize(("load", "dirty"), [(3.0, False), (3.1, True)])
def test_load_from_others_before_the_start_is_dirty(tmp_path: Path, load: float, dirty: bool) -> None:
    assert ConditionsWatch(2, proc(tmp_path, load=load)).finish().dirty is dirty


@pytest.mark.parametrize("text", ["", "cpu\n", "intr 1 2\n", "cpu a b c\n", "cpu  1 2 3\n"])
def test_a_kernel_that_does_not_tell_counts_as_no_steal(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert ConditionsWatch(64, tmp_path).finish().steal_percent == 0


def test_without_proc_the_conditions_are_read_from_the_system(tmp_path: Path) -> None:
    conditions = ConditionsWatch(1, tmp_path / "nowhere").finish()
    assert conditions.steal_percent == 0
    assert conditions.load_before >= 0


def counters(folder: Path, *busy_s: float) -> Path:
    """The kernel's counters of CPUs that were busy for ``busy_s`` seconds, at 100 ticks per second."""
    rows = [f"cpu{core} {round(100 * one)} 0 0 123 45 0 0 0 0 0" for core, one in enumerate(busy_s)]
    (folder / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *rows, "intr 1"]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ((100.0, 200.0, 300.0), ""),
        ((100.2, 200.2, 310.0), ""),
        ((105.0, 205.0, 300.0), "other processes used 1.0 of 2 cores"),
        ((100.0, 216.0, 300.0), "other processes used 1.6 of 2 cores"),
    ],
)
def test_other_processes_are_seen_on_the_cores_that_matter(tmp_path: Path, after: tuple[float, ...], text: str) -> None:
    clock = ManualClock()
    watch = OthersWatch((0, 1), counters(tmp_path, 100.0, 200.0, 300.0), clock)
    counters(tmp_path, *after)
    clock.advance(10)
    assert watch.finish() == text


def test_the_time_of_this_process_and_its_children_is_not_that_of_others(tmp_path: Path, monkeypatch) -> None:
    clock, used = ManualClock(), iter([(1.0, 1.0, 1.0, 1.0), (3.0, 3.0, 3.0, 3.0)])
    monkeypatch.setattr("os.times", lambda: SimpleNamespace(**dict(zip(TIMES, next(used), strict=True))))
    watch = OthersWatch((0, 1), counters(tmp_path, 100.0, 200.0), clock)
    counters(tmp_path, 108.0, 200.0)
    clock.advance(10)
    assert watch.finish() == ""


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu0 a b\n"])
def test_a_kernel_that_does_not_tell_counts_as_quiet(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    clock = ManualClock()
    watch = OthersWatch((0,), tmp_path, clock)
    clock.advance(10)
    assert watch.finish() == ""
