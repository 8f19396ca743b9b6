"""The latency guard judges what it measured, and a part of it runs against real servers."""

from __future__ import annotations

import os

import pytest

from benchmarks.attacks.catalog import ATTACKS, EXPENSIVE
from benchmarks.attacks.process import Outcome
from benchmarks.innocents import Round
from benchmarks.results import failed
from benchmarks.scenarios import hostile
from benchmarks.scenarios.hostile import Siege, await_memory, peak_bytes, reset_peak, rows_of
from benchmarks.servers import Server
from penstock.perf.http_client import Address

MIB = 1 << 20
BEFORE = 100 * MIB


def innocent(p99_ms: float, failures: int = 0) -> Round:
    kinds = {"HTTP: wrong answer": failures} if failures else {}
    return Round(p50_ms=p99_ms / 2, p99_ms=p99_ms, max_ms=p99_ms, requests=1000, failed=kinds, cpu_s=0.1)


def siege(p99_ms: float = 2.0, peak_mib: int = 0, left_mib: int = 0, failures: int = 0) -> Siege:
    return Siege(
        quiet=innocent(1.0),
        attack=innocent(p99_ms, failures),
        control=innocent(1.5),
        outcome=Outcome(cpu_s=1.0, counts={"bytes sent": MIB, "HTTP 200": 7}),
        cpu_s=(2.0, 1.0),
        peak=peak_mib * MIB,
        left=left_mib * MIB,
        back_s=0.5,
    )


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (siege(), []),
        (siege(p99_ms=2.9, peak_mib=128, left_mib=16), []),
        (siege(p99_ms=3.1), ["p99"]),
        (siege(peak_mib=129), ["memory"]),
        (siege(left_mib=17), ["memory left"]),
        (siege(failures=1), ["lost or wrong"]),
    ],
)
def test_a_goal_that_is_missed_is_said(found: Siege, missed: list[str]) -> None:
    rows = rows_of("ping", [found], innocent(1.0), BEFORE, 128)
    assert [row.name for row in failed(rows)] == [f"ping, {what}" for what in missed]
    assert "2× quiet" in rows[0].note or missed or found.attack.p99_ms == 2.9
    assert "1.5 ms" in rows[0].note


def test_a_slow_quiet_server_does_not_excuse_a_slow_answer() -> None:
    slow = siege(p99_ms=101)
    rows = rows_of("ping", [slow], innocent(99), BEFORE, 128)
    assert rows[0].goal == 100
    assert failed(rows)


def test_failures_of_quiet_rounds_count() -> None:
    rows = rows_of("ping", [siege()], innocent(1.0, failures=2), BEFORE, 128)
    assert rows[-1].value == 2


def test_parts_are_the_attacks_and_those_of_unknown_clients() -> None:
    assert set(hostile.PARTS) == {*ATTACKS, *(f"{name}-unknown" for name in EXPENSIVE)}


def test_the_peak_of_memory_is_not_missed_between_two_looks() -> None:
    this = Server(Address("127.0.0.1", 1), os.getpid(), 0.0)
    reset_peak(this)
    before = peak_bytes(this)
    held = bytearray(64 * MIB)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    del held
    assert peak_bytes(this) - before >= 48 * MIB


def test_memory_that_is_back_is_not_waited_for() -> None:
    this = Server(Address("127.0.0.1", 1), os.getpid(), 0.0)
    held = this.rss_bytes()
    waited, left = await_memory(this, held)
    assert left <= 16 * MIB or left <= held / 10
    assert waited < hostile._LEFT_AFTER_S


@pytest.mark.slow
def test_a_part_runs_and_has_all_rows() -> None:
    rows = hostile.part("gzip-json", quick=True, unknown=True, plan=(1, 0.3))
    assert [row.name.partition(", ")[2] for row in rows] == ["p99", "memory", "memory left", "lost or wrong"]
    assert rows[-1].value == 0
    assert "HTTP 401" in rows[0].note
