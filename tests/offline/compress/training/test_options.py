from __future__ import annotations

import msgspec
import pytest

from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.compress.training.options import FitOptions, FitReport, learning_rate

REPORT = FitReport([(10, 1.0), (20, 0.5), (30, 0.25)], [(0, 0.1), (10, 0.9), (20, 0.8)], 30, 10, "patience", 1.5)


def test_provenance_keeps_what_is_the_same_in_every_run() -> None:
    assert REPORT.facts() == {
        "steps": 30,
        "best_step": 10,
        "stopped": "patience",
        "loss": [1.0, 0.25],
        "score": [0.1, 0.9],
    }
    assert msgspec.structs.replace(REPORT, scores=[]).facts()["score"] == []


def test_the_rate_rises_in_the_first_steps_and_falls_to_nothing_as_a_cosine() -> None:
    options = FitOptions(learning_rate=1.0)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[52] == pytest.approx(0.5, abs=0.02)
    assert 0 < rates[-1] < 0.001


def test_a_constant_rate_stays_once_it_has_risen() -> None:
    options = FitOptions(learning_rate=0.5, schedule="constant")
    rates = [learning_rate(step, 40, options) for step in range(40)]
    assert rates[0] == pytest.approx(0.5 / 3)
    assert set(rates[2:]) == {0.5}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_rate_in_every_step(steps: int) -> None:
    assert all(learning_rate(step, steps, FitOptions()) > 0 for step in range(steps))


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": -1.0}, {"held_out": 1.0}, {"threads": 0}, {"patience": 0}],
    ids=str,
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises((InvalidArgument, PenstockError)) as caught:
        FitOptions(**wrong).check()
    assert next(iter(wrong)) in caught.value.message
