from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

import culprits
from penstock.engines.registry import get_engine
from penstock.offline.compress.precision.trials import Trials, divergence
from penstock.offline.dataset import make_dataset
from penstock.offline.judge.accuracy import answers, make_judge, mean_interval, paired_interval, sample_errors

SCORES = np.random.default_rng(0).normal(0, 3, (50, 5)).astype(np.float32)
NOISY = (SCORES + np.random.default_rng(1).normal(0, 1, SCORES.shape)).astype(np.float32)


def kl(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return stats.entropy(
        special.softmax(want.astype(float), axis=1), special.softmax(got.astype(float), axis=1), axis=1
    )


def test_the_divergence_of_class_scores_is_that_of_their_shares() -> None:
    judge = make_judge({"y": SCORES}, None)
    np.testing.assert_allclose(divergence(judge, {"y": NOISY}), kl(SCORES, NOISY), rtol=1e-4)
    shares = special.softmax(SCORES, axis=1)
    judge = make_judge({"y": shares}, None)
    np.testing.assert_allclose(divergence(judge, {"y": special.softmax(NOISY, axis=1)}), kl(SCORES, NOISY), rtol=1e-3)


def test_outputs_that_are_not_judged_do_not_count() -> None:
    reference, outputs = {"y": SCORES, "other": SCORES}, {"y": SCORES, "other": NOISY}
    labelled = make_judge(reference, np.zeros(50, int))
    assert divergence(labelled, outputs).max() == 0
    np.testing.assert_allclose(divergence(make_judge(reference, None), outputs), kl(SCORES, NOISY), rtol=1e-4)


def test_the_divergence_of_other_outputs_is_their_relative_error() -> None:
    reference, outputs = {"y": SCORES[:, :, None]}, {"y": NOISY[:, :, None]}
    judge = make_judge(reference, None)
    np.testing.assert_allclose(divergence(judge, outputs), sample_errors(reference, outputs), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_no_number_diverges_most_and_stays_finite(bad: float) -> None:
    broken = SCORES.copy()
    broken[3, 2] = bad
    found = divergence(make_judge({"y": SCORES}, None), {"y": broken})
    assert np.isfinite(found).all()
    assert found.argmax() == 3
    assert 15 < found[3] <= 28


def test_the_interval_of_hits_is_that_of_matched_pairs() -> None:
    trials = culprits.trials()
    rng = np.random.default_rng(0)
    for before, after in rng.random((20, 2, 40)) < rng.random((20, 2, 1)):
        want = paired_interval(before, after)
        found = trials.judge.interval(before.astype(np.float32) - after)
        assert (found.value, found.low, found.high) == pytest.approx((want.value, want.low, want.high), abs=1e-6)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    found = mean_interval(np.float32(values))
    assert found.low <= found.value <= found.high
    assert np.isfinite([found.low, found.high]).all()


def test_an_outcome_is_that_of_the_version_itself_and_run_once() -> None:
    trials = culprits.trials()
    outcome = trials.outcome(["narrow4", "wide4"])
    count = trials.count
    assert trials.outcome(["wide4", "narrow4"]) is outcome
    assert trials.count == count
    model = get_engine("onnxruntime").load(trials.mixed.with_float({"wide4", "narrow4"}), {"threads": 1})
    outputs = answers(model, trials.data)
    assert outcome.accuracy == trials.judge.compare(outputs)
    np.testing.assert_array_equal(outcome.scores, trials.judge.scores(outputs))
    gain = trials.gain([], ["narrow4", "wide4"])
    assert gain.value == pytest.approx(outcome.accuracy.value - trials.outcome().accuracy.value)
    assert gain.low < gain.value < gain.high


def test_all_groups_float_is_the_original() -> None:
    trials = culprits.trials()
    outcome = trials.outcome([group.name for group in trials.mixed.groups])
    assert outcome.accuracy.loss.value == 0
    assert outcome.divergence.max() == 0
    assert trials.original.accuracy.value == 1


def test_labels_are_used() -> None:
    known = culprits.trials()
    data = make_dataset(known.data.inputs, np.zeros(known.data.count, np.int64))
    trials = Trials(known.mixed, data)
    assert trials.judge.metric == "top-1"
    assert trials.proxy == "KL divergence"
    assert trials.original.accuracy.value < 0.9
