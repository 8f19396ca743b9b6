from __future__ import annotations

import numpy as np
import pytest

import culprits
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge


def test_an_outcome_is_that_of_the_version_itself_and_run_once() -> None:
    trials = culprits.trials()
    outcome = trials.outcome(["narrow4", "wide4"])
    count = trials.count
    assert trials.outcome(["wide4", "narrow4"]) is outcome
    assert trials.count == count
    model = get_engine("onnxruntime").load(trials.mixed.with_float({"wide4", "narrow4"}), {"threads": 1})
    outputs = answers(model, trials.judge.data)
    assert outcome.accuracy == trials.judge.reference.compare(outputs)
    np.testing.assert_array_equal(outcome.scores, trials.judge.reference.scores(outputs))
    gain = trials.gain([], ["narrow4", "wide4"])
    assert gain.value == pytest.approx(outcome.accuracy.value - trials.outcome().accuracy.value)
    assert gain.low < gain.value < gain.high


def test_all_groups_float_is_the_original() -> None:
    trials = culprits.trials()
    outcome = trials.outcome([group.name for group in trials.mixed.groups])
    assert outcome.accuracy.loss.value == 0
    assert outcome.divergence.max() == 0
    assert trials.judge.baseline.accuracy.value == 1


def test_labels_are_used() -> None:
    known = culprits.trials()
    data = make_dataset(known.judge.data.inputs, np.zeros(known.judge.data.count, np.int64))
    trials = Trials(known.mixed, Judge(known.mixed.artifact, data, contract=Contract(trust_labels=True)))
    assert trials.judge.metric == "top-1"
    assert trials.judge.reference.proxy == "KL divergence"
    assert trials.judge.baseline.accuracy.value < 0.9
