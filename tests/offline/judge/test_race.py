from __future__ import annotations

import numpy as np
import pytest

from networks import mlp
from penstock.artifact import Artifact
from penstock.dataset import SizedCall
from penstock.errors import PenstockError
from penstock.offline.judge.race import Entrant, race, race_entrants
from penstock.offline.model_store import SESSION, keep_models
from penstock.perf.measure import FEWEST_LOADS
from row_graphs import parsed

X = [SizedCall({"x": np.ones((1, 16), np.float32)})]


def test_timings_are_paired_by_load_and_named_as_the_models() -> None:
    found = race({("a", 1): mlp(), ("b", 2): mlp()}, X, budget_s=100.0, loads=4)
    assert list(found) == [("a", 1), ("b", 2)]
    first, second = found.values()
    assert len(first.seconds) == len(second.seconds) == 4
    assert first.p50_ms > 0
    assert first.calls >= 4 * 60


def test_calls_of_several_sizes_are_timed_apart_and_weighted() -> None:
    calls = [SizedCall({"x": np.ones((rows, 16), np.float32)}, share) for rows, share in ((1, 0.75), (4096, 0.25))]
    one, two = race({"one": mlp(), "two": mlp()}, calls, budget_s=100.0, loads=4).values()
    for found in (one, two):
        small, large = found.sizes
        assert small.p50_ms < large.p50_ms
        assert found.shares == (0.75, 0.25)
        np.testing.assert_allclose(found.medians, 0.75 * small.medians + 0.25 * large.medians)
    assert len(one.medians) == len(two.medians) == 4


def test_without_time_there_are_the_fewest_loads() -> None:
    (found,) = race({"one": mlp()}, X, budget_s=0.0).values()
    assert len(found.seconds) == FEWEST_LOADS


def test_nothing_is_loaded_here() -> None:
    with keep_models(1 << 30) as store:
        race({"one": mlp()}, X, budget_s=0.0)
    assert store.made[SESSION] == 0


def test_every_entrant_has_its_own_engine_and_options() -> None:
    options = [{"threads": 1}, {"threads": 1, "graph_level": "disabled"}]
    entrants = {str(number): Entrant(mlp(), "onnxruntime", one) for number, one in enumerate(options)}
    assert list(race_entrants(entrants, X, budget_s=0.0)) == ["0", "1"]
    with pytest.raises(PenstockError, match="unknown option"):
        race_entrants({"bad": Entrant(mlp(), "onnxruntime", {"colour": 1})}, X, budget_s=0.0)


def test_a_model_that_does_not_survive_is_an_error_and_the_next_race_is_run() -> None:
    contracts = parsed('y = Einsum<equation = "ia...,ja...->ij...">(x, x)', "float[N,M,K] x", "float[N,P,Q] y")
    with pytest.raises(PenstockError, match="ended its process with status -"):
        race({"dies": contracts}, [SizedCall({"x": np.ones((2, 0, 0), np.float32)})], budget_s=0.0)
    with pytest.raises(PenstockError, match="ONNX"):
        race({"none": Artifact.from_bytes(b"not a model")}, X, budget_s=0.0)
    assert race({"one": mlp()}, X, budget_s=0.0)["one"].calls > 0
