"""The allowance for frames that do not advance a call."""

import pytest

from penstock.clock import ManualClock
from penstock.online.server.h2.guard import BURST, CALL, RATE_PER_S, FloodGuard
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode


def spend(guard: FloodGuard, count: int) -> None:
    for _ in range(count):
        guard.charge()


def test_it_runs_out_and_refills_with_time() -> None:
    clock = ManualClock()
    guard = FloodGuard(clock)
    spend(guard, BURST)
    clock.advance(2)
    spend(guard, int(2 * RATE_PER_S))
    with pytest.raises(ConnectionFault) as caught:
        guard.charge()
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_long_time_gives_no_more_than_a_burst() -> None:
    clock = ManualClock()
    guard = FloodGuard(clock)
    spend(guard, BURST)
    clock.advance(1e6)
    spend(guard, BURST)
    with pytest.raises(ConnectionFault):
        guard.charge()


def test_answers_pay_for_as_many() -> None:
    guard = FloodGuard(ManualClock())
    for _ in range(3 * BURST):
        guard.earned += CALL
        guard.charge(CALL)
    for _ in range(BURST):
        guard.earned += CALL
    spend(guard, BURST)


def test_bytes_that_the_client_has_read_pay_too() -> None:
    """A client with a small window acknowledges a large response with many frames."""
    written = 0
    guard = FloodGuard(ManualClock(), lambda: written)
    for _ in range(5 * BURST):
        written += 1 << 12
        guard.charge()
    with pytest.raises(ConnectionFault):
        spend(guard, 2 * BURST)
