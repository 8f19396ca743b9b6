from __future__ import annotations

import numpy as np
import pytest

import networks
from penstock.artifact import Artifact
from penstock.dataset import SizedCall
from penstock.offline.tune import look
from penstock.offline.tune.look import make_look
from penstock.perf.measure import Timings

X = [SizedCall({"x": np.ones((1, 16), np.float32)}, 1.0)]


def test_each_engine_times_the_two_models_in_turns() -> None:
    found = make_look(("onnxruntime", "openvino"), X, 1, budget_s=0.1)(networks.mlp(512), networks.mlp(8), ())
    assert list(found) == ["onnxruntime", "openvino"]
    assert all(one.value > 1 for one in found.values())


def test_only_engines_that_are_wanted_and_can_run_the_model_are_asked() -> None:
    asked = make_look(("onnxruntime",), X, 1, budget_s=0.0)
    assert asked(networks.mlp(), networks.mlp(), ("openvino",)) == {}
    assert asked(networks.mlp(), Artifact.from_bytes(b"not a model"), ()) == {}


def test_the_second_model_is_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def race(entrants, *_) -> dict[str, Timings]:
        return {name: Timings([np.full(4, len(one.artifact.data))] * 3) for name, one in entrants.items()}

    monkeypatch.setattr(look, "race_entrants", race)
    one, other = Artifact.from_bytes(b"1234"), Artifact.from_bytes(b"12")
    assert make_look(("onnxruntime",), X, 1, 0.0)(one, other, ())["onnxruntime"].value == pytest.approx(2)
