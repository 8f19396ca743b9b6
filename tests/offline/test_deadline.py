from __future__ import annotations

import math

from penstock.clock import ManualClock
from penstock.offline.deadline import BuildDeadline


def test_the_budget_is_used_up_as_time_passes() -> None:
    clock = ManualClock()
    deadline = BuildDeadline(10.0, clock)
    assert (deadline.left_s, deadline.is_past(), deadline.is_past(0.0)) == (10.0, False, True)
    clock.advance(4.0)
    assert deadline.left_s == 6.0
    assert deadline.is_past(0.4)
    assert not deadline.is_past(0.41)
    clock.advance(7.0)
    assert (deadline.left_s, deadline.is_past()) == (0.0, True)


def test_a_pause_does_not_count() -> None:
    clock = ManualClock()
    deadline = BuildDeadline(10.0, clock)
    with deadline.paused():
        clock.advance(100.0)
    assert deadline.left_s == 10.0


def test_an_expired_budget_is_over_at_once() -> None:
    deadline = BuildDeadline()
    assert deadline.left_s == math.inf
    assert not deadline.is_past(1e-9)
    deadline.expire()
    assert (deadline.left_s, deadline.is_past(), deadline.interrupted) == (0.0, True, True)


def test_it_says_why_there_is_no_more_time() -> None:
    deadline = BuildDeadline(0.0)
    assert deadline.why_late == "there was no time within --budget"
    deadline.expire()
    assert deadline.why_late == "the build was interrupted"
