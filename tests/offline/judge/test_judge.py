"""The comparison of two models."""

from __future__ import annotations

import numpy as np
import pytest

import models
from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import InvalidConfig, InvalidData
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge, checked_reference, coupling_notes, hold_out, judging
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


def test_of_several_outputs_the_judged_one_is_named_with_metric_and_reason() -> None:
    outputs = {"y": _X3 @ models.linear_weight(3, 4), "z": _X3 @ models.linear_weight(3, 4, seed=1)}
    for contract, told in (
        (
            Contract(),
            "judging output 'y' by top-1: there are labels, [40] of type int64, and 'y' is the first output that",
        ),
        (Contract(metric="f1"), "judging output 'y' by f1: as asked for, and 'y' is the first output that suits"),
        (Contract(metric="fidelity"), "judging output 'y', 'z' by fidelity: as asked for; choose with --metric-output"),
    ):
        (note,) = judging(checked_reference(outputs, LABELLED.labels, contract), contract)
        assert note.startswith(told)
        assert note.endswith("; choose with --metric-output")
    for found, contract in ((outputs, Contract(output="y")), ({"y": outputs["y"]}, Contract())):
        assert judging(checked_reference(found, LABELLED.labels, contract), contract) == ()


def test_a_note_warns_if_few_samples_decide_the_spread() -> None:
    answers = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    contract = Contract(metric="fidelity")
    assert judging(checked_reference({"y": answers}, None, contract), contract) == ()
    answers[:8] *= 100
    (note,) = judging(checked_reference({"y": answers}, None, contract), contract)
    assert "a twentieth of the samples makes up 99% of the spread of output 'y'" in note
    assert "--metric cosine" in note


def test_labels_of_another_output_are_refused_with_the_option_that_chooses_it() -> None:
    outputs = {"z": np.random.default_rng(5).normal(size=(40, 4)), "y": _X3 @ models.linear_weight(3, 4)}
    with pytest.raises(InvalidData, match="no better than chance on the labels: its top-1 of output 'z' is 0") as error:
        checked_reference(outputs, LABELLED.labels, Contract())
    assert "--metric-output or --metric" in (error.value.hint or "")
    assert checked_reference(outputs, LABELLED.labels, Contract(output="y")).output == "y"


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


@pytest.mark.parametrize("metric", ["", "fidelity"])
def test_fidelity_cannot_be_proven(metric: str) -> None:
    # A rare sample far from the others may make most of the spread, by which every difference is divided.
    with pytest.raises(
        InvalidConfig, match="a loss of fidelity cannot be proven: its scores depend on the spread"
    ) as error:
        Judge(mlp(), make_dataset(X, None), contract=Contract(metric=metric, prove_accuracy=True))
    assert "--metric with one of top-1, agreement, top-5, cosine" in (error.value.hint or "")
    assert (
        Judge(mlp(), make_dataset(X, None), contract=Contract(metric="cosine", prove_accuracy=True)).metric == "cosine"
    )


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
    centred = _centred()
    of_all = make_dataset({"x": _X3}, (_X3 - _X3.mean(axis=0)).argmax(axis=1))
    found = Judge(centred, of_all, contract=Contract(trust_labels=True))
    assert of_all.labels is not None
    assert found.baseline.accuracy.value == (of_all.labels == 0).mean() < 0.9
    assert found.assess(centred).accuracy.value == found.baseline.accuracy.value
    (note,) = coupling_notes(found.coupling)
    assert "ReduceMean" in note
    assert note.endswith("every row was run alone, as the server runs it")
    with pytest.raises(InvalidData, match=r"no better than chance.*Rows of the model may depend on each other \("):
        Judge(centred, of_all)


def test_a_candidate_whose_rows_depend_on_each_other_is_judged_as_it_is_served() -> None:
    n = Network()
    n.op("Identity", "x", name="y")
    judge = Judge(n.artifact({"x": ["N", 3]}, {"y": ["N", 3]}), make_dataset({"x": _X3}, _X3.argmax(axis=1)))
    assert coupling_notes(judge.coupling) == ()
    served = (_X3.argmax(axis=1) == 0).mean()  # alone, a row is its own mean, so all scores are 0
    assert judge.assess(_centred()).accuracy.value == served < 0.9


def test_a_fixed_batch_is_no_dependence() -> None:
    assert Judge(models.fixed_batch(), make_dataset({"x": _X3[:, :3]}, None)).coupling == ""


def _centred() -> Artifact:
    """``y = x - mean(x)``, where the mean is over the rows of the call."""
    n = Network()
    n.op("Sub", "x", n.op("ReduceMean", "x", axes=[0], keepdims=1), name="y")
    return n.artifact({"x": ["N", 3]}, {"y": ["N", 3]})
