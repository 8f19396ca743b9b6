"""Slow models: large calls are left out, and the certificate lists them."""

from __future__ import annotations

import numpy as np

from penstock.clock import ManualClock
from penstock.offline.convert.parity.cases import Case
from penstock.offline.convert.parity.patience import Patience


def case(label: str, elements: int) -> Case:
    return Case(label, {"x": np.zeros(elements, np.float32)})


def spend(patience: Patience, clock: ManualClock, one: Case, seconds: float, *, is_essential: bool = False) -> None:
    with patience.spending(one, is_essential=is_essential):
        clock.advance(seconds)


def test_a_fast_model_is_compared_completely() -> None:
    clock = ManualClock()
    patience = Patience(60.0, clock)
    spend(patience, clock, case("small", 10), 0.5)
    assert patience.allows(case("large", 1000))
    assert patience.left_out == []


def test_a_call_that_would_take_too_long_is_left_out_and_a_later_smaller_one_is_not() -> None:
    clock = ManualClock()
    patience = Patience(60.0, clock)
    spend(patience, clock, case("small", 10), 1.0)
    assert not patience.allows(case("large", 1000))
    assert patience.allows(case("moderate", 100))
    assert patience.left_out == ["large"]


def test_time_that_is_spent_is_gone() -> None:
    clock = ManualClock()
    patience = Patience(60.0, clock)
    spend(patience, clock, case("slow", 10), 70.0)
    assert not patience.allows(case("small", 1))


def test_essential_calls_cost_nothing() -> None:
    clock = ManualClock()
    patience = Patience(60.0, clock)
    spend(patience, clock, case("the sample", 1000), 1000.0, is_essential=True)
    assert patience.allows(case("small", 10))
    assert not patience.allows(case("as large", 1000))
