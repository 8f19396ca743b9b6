from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import culprits
from penstock.measurement import Interval
from penstock.offline.compress.precision import savings
from penstock.offline.compress.precision.savings import Savings, measure_savings
from penstock.perf.measure import Timings


def test_every_group_is_timed_and_the_int8_model_too() -> None:
    trials = culprits.trials()
    names = [group.name for group in trials.mixed.groups]
    found = measure_savings(trials, names, rows=1, budget_s=0.1, memory_bytes=1 << 30)
    assert list(found.saving_ms) == names
    assert found.int8_ms is not None
    assert found.int8_ms > 0
    for saving in found.saving_ms.values():
        assert saving.low <= saving.value <= saving.high
        assert saving.value > -found.int8_ms
    assert all(found.saving_ms[name].high <= 0 for name in found.unpaying)


def test_what_the_budget_does_not_reach_stays_untimed() -> None:
    trials = culprits.trials()
    names = [group.name for group in trials.mixed.groups]
    # Little memory: blocks of one.
    found = measure_savings(trials, names, rows=1, budget_s=1e-9, memory_bytes=1)
    assert list(found.saving_ms) == names[:1]


class FakeTrials:
    """Versions with a latency of 1 ms, plus an amount for each float group, and ``bonus`` if more than one group is float.

    Timings have noise of one per mille.
    """

    def __init__(self, saved: dict[str, float], bonus: float = 0.0) -> None:
        self.saved = saved
        self.judge = SimpleNamespace(threads=1, race=self.race)
        self._noise = np.random.default_rng(0)

        class Mixed:
            artifact = culprits.trials().mixed.artifact

            @staticmethod
            def with_float(floats: tuple[str, ...] = ()) -> float:
                return 1.0 + sum(saved[name] for name in floats) + (bonus if len(floats) > 1 else 0)

        self.mixed = Mixed()

    def race(self, models: dict[str, float], budget_s: float, rows: int) -> dict[str, Timings]:
        return {
            name: Timings(milliseconds * 1e-3 * self._noise.normal(1, 1e-3, (20, 3)))
            for name, milliseconds in models.items()
        }


def measured(trials: FakeTrials) -> Savings:
    return measure_savings(trials, list(trials.saved), rows=1, budget_s=1.0, memory_bytes=1 << 30)


def test_a_saving_is_the_latency_without_the_integers_less_that_with_them() -> None:
    found = measured(FakeTrials({"a": 0.5, "b": -0.2, "c": 0.05}))
    assert found.int8_ms == pytest.approx(1.0, abs=2e-3)
    for name, want in (("a", 0.5), ("b", -0.2), ("c", 0.05)):
        saving = found.saving_ms[name]
        # A median of twenty medians of three, with noise of one per mille, has a standard error of a quarter of that.
        assert saving.value == pytest.approx(want, abs=2e-3)
        assert saving.high - saving.low < 4e-3
    assert found.unpaying == ("b",)


@pytest.mark.parametrize(("bonus", "want"), [(0.0, ("b", "d")), (0.4, ("d",))])
def test_groups_do_not_pay_only_if_they_do_not_together(bonus: float, want: tuple[str, ...]) -> None:
    found = measured(FakeTrials({"a": 0.5, "b": -0.1, "c": 0.1, "d": -0.2}, bonus))
    assert found.unpaying == want


def test_no_difference_is_no_saving() -> None:
    same = Timings(np.full((7, 1), 1e-3))
    assert savings._saving(same, same) == Interval(0.0, 0.0, 0.0)
