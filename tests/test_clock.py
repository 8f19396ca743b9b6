from __future__ import annotations

import pytest

from penstock.clock import ManualClock, SystemClock


def test_system_clock_never_runs_backwards() -> None:
    clock = SystemClock()
    moments = [clock.now() for _ in range(1000)]
    assert moments == sorted(moments)


def test_manual_clock_moves_when_told() -> None:
    clock = ManualClock(start=5)
    assert (clock.now(), clock.now()) == (5, 5)
    clock.advance(1.5)
    clock.advance(0)
    assert clock.now() == 6.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
