from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy, Interval
from penstock.offline.data_notes import about, too_few, unlike, unproved
from penstock.offline.dataset import Dataset, make_dataset
from penstock.offline.judge.metrics import paired_interval


@pytest.fixture(scope="module")
def model() -> Artifact:
    return networks.mlp()


def samples(count: int, shift: float = 0.0, seed: int = 0) -> Dataset:
    x = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32) + np.float32(shift)
    return make_dataset({"x": x}, None)


@given(st.integers(1, 3000), st.sampled_from([0.005, 0.01, 0.05, 0.5]))
def test_too_few_is_when_not_even_no_change_is_proof(count: int, loss: float) -> None:
    right = np.ones(count, bool)
    is_provable = paired_interval(right, right).high <= loss
    assert bool(too_few(count, "top-1", loss, "evaluation")) == (not is_provable)


def test_how_many_are_needed_is_told() -> None:
    (note,) = too_few(75, "agreement", 0.01, "held-out")
    assert "75 held-out samples are too few to decide on a loss of 1.00%: give at least 194" in note
    assert "better 812" in note
    assert too_few(1, "fidelity", 0.01, "held-out") == ()
    assert too_few(1, "top-1", 0.0, "held-out") == ()


def test_what_is_within_the_bound_but_not_proved_is_noted() -> None:
    def accuracy(value: float, high: float, metric: str = "top-1") -> Accuracy:
        return Accuracy(metric, 0.9, Interval(value, -high, high), 0.1, 250)  # type: ignore[arg-type]

    (note,) = unproved(accuracy(0.004, 0.012), 0.01)
    assert "an estimate on 250 samples" in note
    assert "may be up to 1.20%" in note
    assert "samples would do" in note
    assert "would do" not in unproved(accuracy(0.01, 0.02), 0.01)[0]
    assert unproved(accuracy(0.004, 0.009), 0.01) == ()
    assert unproved(accuracy(0.02, 0.03), 0.01) == ()
    assert unproved(accuracy(0.004, 0.012, "fidelity"), 0.01) == ()


def test_data_unlike_one_another_are_told_with_the_evidence(model: Artifact) -> None:
    assert unlike(model, samples(200), samples(300, seed=1)) == ()
    first, *_ = unlike(model, samples(200), samples(300, shift=1.5, seed=1))
    assert "unlike the evaluation data: tensor 'x'" in first
    assert "PSI" in first


def test_no_note_where_nothing_can_be_compared(model: Artifact) -> None:
    nothing = make_dataset({"y": np.zeros((4, 3), np.float32)}, None)
    assert unlike(model, nothing, nothing) == ()
    assert about(model, nothing, nothing, 0.01) == ()


def test_large_data_are_compared_on_some_samples(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def find_drift(_model: Artifact, fitted: Dataset, judged: Dataset) -> list[object]:
        seen.extend([fitted.count, judged.count])
        return []

    monkeypatch.setattr("penstock.offline.data_notes.find_drift", find_drift)
    unlike(model, samples(5000), samples(30), multiple=7)
    assert seen == [511, 28]


def test_all_that_can_be_said_before_the_work(model: Artifact) -> None:
    few, shifted, *_ = about(model, samples(300), samples(100, shift=1.5, seed=1), 0.01)
    assert "100 evaluation samples are too few" in few
    assert "unlike" in shifted
    same = samples(100)
    assert len(about(model, same, same, 0.01)) == 1
    assert len(about(model, None, same, 0.01)) == 1
