"""The comparison of two models."""

from __future__ import annotations

import numpy as np
import pytest

import models
from networks import Network, mlp
from penstock.dataset import make_dataset
from penstock.errors import InvalidConfig, InvalidData
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, hold_out
from penstock.resources import machine_facts

LINEAR = models.linear(3, 4)
X = {"x": np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)}

_X3 = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELLED = make_dataset({"x": _X3}, (_X3 @ models.linear_weight(3, 4)).argmax(axis=1))


@pytest.mark.parametrize("rows", [1, 8])
def test_int8_against_fp32(rows: int) -> None:
    original, scheme = mlp(), integer_scheme(machine_facts())
    compressed = quantize(original, ranges(collect(original, X), RangeMethod.MIN_MAX, scheme), scheme)
    found = Judge(original, make_dataset(X, None)).compare(compressed, rows=rows, budget_s=0.1)
    assert found.size_ratio == pytest.approx(original.size_bytes / compressed.size_bytes)
    assert found.size_ratio > 1
    assert found.accuracy.metric == "fidelity"
    assert 0 < found.accuracy.relative_error < 0.1
    assert found.original_accuracy == 1
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.speedup.value == pytest.approx(found.original_ms / found.compressed_ms, rel=0.5)
    assert found.rows == rows


def test_a_model_against_itself_loses_nothing() -> None:
    found = Judge(LINEAR, LABELLED).compare(LINEAR, budget_s=0.1)
    assert found.accuracy.loss.value == found.accuracy.relative_error == 0
    assert found.accuracy.metric == "top-1"
    assert found.size_ratio == 1


def test_labels_that_the_original_does_not_predict_are_refused_unless_trusted() -> None:
    assert LABELLED.labels is not None
    wrong = make_dataset(LABELLED.inputs, np.random.default_rng(1).permutation(LABELLED.labels))
    with pytest.raises(InvalidData, match="the original is no better than chance on the labels"):
        Judge(LINEAR, wrong)
    assert Judge(LINEAR, wrong, contract=Contract(trust_labels=True)).metric == "top-1"


def test_an_original_whose_answers_are_not_numbers_is_an_error() -> None:
    x = X["x"].copy()
    x[7] = np.nan
    with pytest.raises(
        InvalidData, match="the original's output '.*' is NaN or infinite in 1 of 40 samples, first in sample 7"
    ):
        Judge(mlp(), make_dataset({"x": x}, None))


def test_the_contract_names_the_metric() -> None:
    data = make_dataset(X, None)
    assert Judge(mlp(), data, contract=Contract(metric="cosine")).metric == "cosine"
    with pytest.raises(InvalidConfig, match="a loss of rank cannot be proven: its intervals are approximate"):
        Judge(mlp(), data, contract=Contract(metric="rank", prove_accuracy=True))
    assert Judge(mlp(), data, contract=Contract(metric="rank")).metric == "rank"


def test_no_samples_are_refused() -> None:
    with pytest.raises(InvalidData, match="no samples to judge on"):
        Judge(mlp(), make_dataset({"x": X["x"][:0]}, None))


def test_what_is_held_out_is_drawn_at_random() -> None:
    fitted, held = hold_out(mlp(), make_dataset(X, None), 0.25)
    assert (fitted.count, held.count) == (30, 10)
    assert not np.array_equal(held.inputs["x"], X["x"][30:])


def test_the_baseline_is_the_originals_own_accuracy() -> None:
    judge = Judge(LINEAR, LABELLED, looks=3)
    assert judge.baseline.accuracy == judge.reference.original()
    assert judge.baseline.accuracy.looks == 3
    np.testing.assert_array_equal(judge.baseline.scores, np.ones(40, np.float32))
    assert (judge.baseline.scores.dtype, judge.baseline.divergence.max()) == (np.float32, 0)


def test_intervals_are_those_of_the_reference() -> None:
    judge = Judge(LINEAR, LABELLED)
    found = judge.assess(models.linear(3, 4, seed=1))
    assert found.accuracy.loss.value > 0
    assert found.scores.mean() == pytest.approx(found.accuracy.value)
    assert found.divergence.max() > 0


def test_rows_that_depend_on_each_other_are_judged_as_they_are_served() -> None:
    """Such a model is served row by row, where the scores of this one are 0."""
    n = Network()
    n.op("Sub", "x", n.op("ReduceMean", "x", axes=[0], keepdims=1), name="y")
    centred = n.artifact({"x": ["N", 3]}, {"y": ["N", 3]})
    of_all = make_dataset({"x": _X3}, (_X3 - _X3.mean(axis=0)).argmax(axis=1))
    found = Judge(centred, of_all, contract=Contract(trust_labels=True))
    assert of_all.labels is not None
    assert found.baseline.accuracy.value == (of_all.labels == 0).mean() < 0.9
    assert found.assess(centred).accuracy.value == found.baseline.accuracy.value
