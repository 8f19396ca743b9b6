from __future__ import annotations

import numpy as np

from networks import mlp
from penstock.offline.judge.race import race, race_loaded
from penstock.offline.sessions import loaded

X = {"x": np.ones((1, 16), np.float32)}


def test_timings_are_paired_by_round_and_named_as_the_models() -> None:
    found = race({("a", 1): mlp(), ("b", 2): mlp()}, X, budget_s=0.05)
    assert list(found) == [("a", 1), ("b", 2)]
    first, second = found.values()
    assert first.seconds.shape[0] == second.seconds.shape[0] >= 7
    assert first.p50_ms > 0


def test_loaded_models_are_raced_as_they_are() -> None:
    with loaded(mlp()) as model:
        assert list(race_loaded({"one": model}, X, budget_s=0.05, precision=0.5)) == ["one"]
