from __future__ import annotations

import msgspec
import numpy as np
import pytest

import networks
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy
from penstock.dataset import make_dataset
from penstock.errors import PenstockError
from penstock.measurement import Interval
from penstock.offline.compress.planner import gain as module
from penstock.offline.compress.planner.gain import StepGain, gain_objection, measure
from penstock.offline.judge.judge import Judge


def measured(low: float, stored: int = 0) -> StepGain:
    gain = Interval(low + 0.1, low, low + 0.2)
    return StepGain(Accuracy("top-1", 0.9, Interval(0, 0, 0), 0, 75), gain, gain, stored)


def test_a_step_must_gain_provably() -> None:
    assert not gain_objection(measured(1.02), "original", 0)
    assert "not provably faster than 'original': 1.10x" in gain_objection(measured(1.0), "original", 0)
    busy = msgspec.structs.replace(measured(1.0), busy="other processes used 1.2 of 2 cores")
    assert gain_objection(busy, "original", 0).startswith("not measurable here, the machine was busy (other processes")
    assert not gain_objection(measured(0.5, 990), "original", 1000)
    assert gain_objection(measured(2.0, 991), "prune", 1000) == "991 bytes as a coded model, 'prune' has 1,000"


def test_the_original_loses_nothing_and_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMING_S", 0.02)
    model = networks.mlp()
    x = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    judge = Judge(model, make_dataset({"x": x}, None))
    found = measure(judge, model, model, "size")
    assert found.accuracy.loss.value == 0
    assert found.accuracy.metric == "fidelity"
    assert found.stored_bytes == len(encode(model.data))
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    with pytest.raises(PenstockError, match="shape"):
        measure(judge, model, other(), "latency")


def other():  # type: ignore[no-untyped-def]
    """Like ``mlp``, with outputs of another shape."""
    n = networks.Network()
    n.gemm("x", 16, 3, name="y")
    return n.artifact({"x": ["N", 16]}, {"y": ["N", 3]})
