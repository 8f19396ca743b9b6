"""The memory of closed streams, and its limit."""

from penstock.online.server.h2.closed_streams import REMEMBERED, ClosedStreams


def test_a_reset_stream_is_ended_once() -> None:
    closed = ClosedStreams()
    closed.reset(3)
    assert closed.is_reset(3)
    assert not closed.is_reset(1)
    assert closed.end(3)
    assert not closed.is_reset(3)
    assert not closed.end(3)
    assert not closed.end(1)


def test_the_oldest_are_forgotten() -> None:
    closed = ClosedStreams()
    for n in range(3 * REMEMBERED):
        closed.reset(2 * n + 1)
    assert len(closed) == REMEMBERED
    assert not closed.is_reset(1)
    assert closed.is_reset(6 * REMEMBERED - 1)


def test_numbers_that_are_left_out() -> None:
    closed = ClosedStreams()
    closed.leave_out(range(2, 9))
    assert closed.is_left_out(7)
    assert not closed.is_left_out(9)
    for n in range(10, 10_000, 10):
        closed.leave_out(range(n, n + 5))
    assert not closed.is_left_out(7)
    assert closed.is_left_out(9993)
