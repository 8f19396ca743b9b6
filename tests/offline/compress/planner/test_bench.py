from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.bundle.coded import encode
from penstock.bundle.evidence import Accuracy, Interval
from penstock.errors import InvalidData, PenstockError
from penstock.offline.compress.planner import bench as module
from penstock.offline.compress.planner.bench import Bench, Measured, gain_objection, hold_out
from penstock.offline.dataset import make_dataset


@given(st.integers(1, 5), st.integers(0, 60))
def test_every_fourth_block_is_held_out(multiple: int, blocks: int) -> None:
    count = multiple * blocks
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    data = make_dataset({"x": x}, np.arange(count))
    if blocks < 2:
        with pytest.raises(InvalidData, match="cannot be split"):
            hold_out(data, multiple)
        return
    fitted, held = hold_out(data, multiple)
    assert fitted.labels is not None
    assert held.labels is not None
    assert sorted([*fitted.labels, *held.labels]) == list(range(count))
    assert fitted.count % multiple == held.count % multiple == 0
    assert (held.inputs["x"][:, 0] == held.labels).all()
    expected = [n for n in range(count) if (n // multiple) % min(4, blocks) == min(4, blocks) - 1]
    assert held.labels.tolist() == expected


def test_sorted_data_leave_all_classes_on_both_sides() -> None:
    labels = np.repeat(np.arange(10), 20)
    fitted, held = hold_out(make_dataset({"x": np.zeros((200, 1), np.float32)}, labels), 1)
    assert fitted.labels is not None
    assert held.labels is not None
    assert set(fitted.labels) == set(held.labels) == set(range(10))


def measured(low: float, stored: int = 0) -> Measured:
    gain = Interval(low + 0.1, low, low + 0.2)
    return Measured(Accuracy("top-1", 0.9, Interval(0, 0, 0), 0, 75), gain, gain, stored)


def test_a_step_must_gain_provably() -> None:
    assert not gain_objection(measured(1.02), "original", 0)
    assert "not provably faster than 'original': 1.10x" in gain_objection(measured(1.0), "original", 0)
    assert not gain_objection(measured(0.5, 990), "original", 1000)
    assert gain_objection(measured(2.0, 991), "prune", 1000) == "991 bytes as coded, 'prune' has 1,000"


def test_the_original_loses_nothing_and_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMING_S", 0.02)
    model = networks.mlp()
    x = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    found = Bench(model, make_dataset({"x": x}, None), "size", 1).measure(model, model)
    assert found.accuracy.loss.value == 0
    assert found.accuracy.metric == "agreement"
    assert found.stored_bytes == len(encode(model.data))
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    with pytest.raises(PenstockError, match="shape"):
        Bench(model, make_dataset({"x": x}, None), "latency", 1).measure(model, other())


def other():  # type: ignore[no-untyped-def]
    """As ``mlp``, with answers of another shape."""
    n = networks.Network()
    n.gemm("x", 16, 3, name="y")
    return n.artifact({"x": ["N", 16]}, {"y": ["N", 3]})
