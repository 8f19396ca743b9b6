from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from scipy import special, stats

import models
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.offline.judge.accuracy import answers, make_reference
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.metrics import paired_interval, sample_errors
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

SCORES = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 5], [9, 0, 0]])
RIGHT = np.array([0, 1, 2, 0])


def test_top_1_counts_labels() -> None:
    judge = make_reference({"scores": SCORES}, RIGHT)
    worse = SCORES.copy()
    worse[3] = [0, 9, 0]
    found = judge.compare({"scores": worse})
    assert (found.metric, found.value, found.samples) == ("top-1", 0.75, 4)
    assert found.loss.value == pytest.approx(0.25)
    assert judge.compare({"scores": SCORES}).value == 1


def test_a_candidate_may_be_better_than_the_original() -> None:
    judge = make_reference({"scores": SCORES}, np.array([0, 1, 2, 1]))
    better = SCORES.copy()
    better[3] = [0, 9, 0]
    assert judge.compare({"scores": better}).loss.value == pytest.approx(-0.25)


def test_the_original_loses_nothing() -> None:
    found = make_reference({"scores": SCORES}, np.array([0, 1, 1, 1])).original()
    assert found.value == 0.5
    assert (found.loss.low, found.loss.value, found.loss.high, found.relative_error) == (0, 0, 0, 0)


def test_without_labels_scores_are_judged_by_agreement() -> None:
    judge = make_reference({"scores": SCORES, "more": SCORES[:, ::-1]}, None)
    assert judge.metric == "agreement"
    one, two = SCORES.copy(), SCORES[:, ::-1].copy()
    one[0], two[1] = [0, 0, 9], -two[1]
    found = judge.compare({"scores": one, "more": SCORES[:, ::-1]})
    assert (found.value, found.loss.value) == (0.75, 0.25)
    assert judge.compare({"scores": one, "more": two}).value == 0.5


def test_without_labels_scores_beside_another_output_are_judged_by_fidelity() -> None:
    assert make_reference({"hidden": np.zeros((4, 2, 2), np.float32), "scores": SCORES}, None).metric == "fidelity"


def test_scores_in_bfloat16_are_scores() -> None:
    judge = make_reference({"scores": SCORES.astype(ml_dtypes.bfloat16)}, RIGHT)
    assert judge.compare({"scores": SCORES.astype(ml_dtypes.bfloat16)}).value == 1


@pytest.mark.parametrize(
    "reference",
    [np.ones((4, 1), np.float32), np.ones((4, 2, 3), np.float32), np.ones(4, np.float32), np.ones((4, 3), np.int64)],
    ids=["one column", "three axes", "one axis", "integers"],
)
def test_everything_else_is_judged_by_fidelity(reference: np.ndarray) -> None:
    judge = make_reference({"y": reference}, None)
    found = judge.compare({"y": reference * 2})
    assert found.metric == "fidelity"
    assert found.value == pytest.approx(0)
    assert found.loss.value == pytest.approx(1)
    assert judge.original().value == 1


def test_fidelity_is_one_less_the_mean_error_with_its_interval() -> None:
    reference = np.ones((4, 1), np.float32)
    errors = np.float32([[0.0], [0.1], [0.2], [0.3]])
    found = make_reference({"y": reference}, None).compare({"y": reference + errors})
    assert found.value == pytest.approx(0.85)
    # Standard deviation of the errors 0.129099, of their mean half of that.
    assert (found.loss.low, found.loss.high) == pytest.approx((0.15 - 0.126516, 0.15 + 0.126516), abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("labels", [RIGHT, None], ids=["top-1", "agreement"])
def test_broken_answers_are_numbers_all_the_same(bad: float, labels: np.ndarray | None) -> None:
    judge = make_reference({"scores": SCORES}, labels)
    found = judge.compare({"scores": np.full_like(SCORES, bad)})
    assert found.loss.value > 0
    assert found.relative_error >= 1
    assert all(np.isfinite([found.value, found.loss.low, found.loss.high, found.relative_error]))


def test_nan_is_a_miss_even_where_it_would_be_picked() -> None:
    scores = SCORES.copy()
    scores[0, 0] = np.nan
    assert make_reference({"scores": SCORES}, RIGHT).compare({"scores": scores}).value == 0.75


def test_infinity_that_the_original_has_as_well_is_no_error() -> None:
    masked = SCORES.copy()
    masked[:, 2] = -np.inf
    judge = make_reference({"scores": masked}, None)
    found = judge.compare({"scores": masked.copy()})
    assert (found.value, found.relative_error) == (1, 0)


def test_an_output_that_no_label_judges_is_held_against_the_contract() -> None:
    reference = {"scores": SCORES, "embedding": np.ones((4, 8), np.float32)}
    found = make_reference(reference, RIGHT).compare({"scores": SCORES * 3, "embedding": np.zeros((4, 8), np.float32)})
    assert (found.metric, found.value) == ("top-1", 1.0)
    assert (found.unjudged_output, found.unjudged_error) == ("embedding", pytest.approx(1.0))
    assert "output 'embedding' is off by 100%" in Contract().accuracy_objection(found)
    fine = make_reference(reference, RIGHT).compare({**reference, "scores": SCORES * 3})
    assert Contract().accuracy_objection(fine) == ""


def test_text_differs_or_does_not() -> None:
    reference = {"y": np.array([[b"a", b"b"], [b"c", b"d"]], object)}
    judge = make_reference(reference, None)
    assert judge.compare(reference).value == 1
    found = judge.compare({"y": np.array([[b"a", b"b"], [b"x", b"y"]], object)})
    assert found.value == pytest.approx(0.5)


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(InvalidData, match=r"labels go up to 7.*\{'scores': \[4, 3\]\}"):
        make_reference({"scores": SCORES}, np.array([0, 1, 2, 7]))
    with pytest.raises(InvalidData, match="labels go up to 2"):
        make_reference({"classes": RIGHT}, RIGHT)


def test_the_output_with_enough_classes_is_judged() -> None:
    assert make_reference({"two": np.ones((4, 2), np.float32), "scores": SCORES}, RIGHT).output == "scores"


def test_answers_of_another_shape_are_refused() -> None:
    with pytest.raises(PenstockError, match=r"'scores' has shape \[4, 2\], the original's \[4, 3\]"):
        make_reference({"scores": SCORES}, RIGHT).compare({"scores": SCORES[:, :2]})


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_answers_are_those_of_one_call(count: int) -> None:
    model = get_engine("onnxruntime").load(models.linear(3, 2), {"threads": 1})
    x = np.random.default_rng(0).random((count, 3), np.float32)
    found = answers(model, make_dataset({"x": x}, None))
    np.testing.assert_allclose(found["y"], x @ models.linear_weight(3, 2), rtol=1e-5)


def test_a_fixed_batch_is_kept() -> None:
    model = get_engine("onnxruntime").load(models.fixed_batch(), {"threads": 1})
    x = np.random.default_rng(0).random((5, 3), np.float32)
    np.testing.assert_array_equal(answers(model, make_dataset({"x": x}, None))["y"], -x)


def test_an_answer_without_an_axis_for_its_sample_gets_one() -> None:
    signature = Signature((TensorSpec("x", DataType.FP32, (1, 2)),), (TensorSpec("y", DataType.FP32, (3,)),))
    model = FakeModel(signature, lambda inputs: {"y": np.float32([1, 2, 3])})
    assert answers(model, make_dataset({"x": np.ones((4, 2), np.float32)}, None))["y"].shape == (4, 3)


def test_outputs_that_cannot_be_paired_are_refused() -> None:
    fixed = Signature((TensorSpec("x", DataType.FP32, (1, 2)),), (TensorSpec("y", DataType.FP32, (-1, 4)),))
    varying = FakeModel(fixed, lambda inputs: {"y": np.ones((int(inputs["x"][0, 0]), 4), np.float32)})
    with pytest.raises(Unsupported, match="shape differs from sample to sample"):
        answers(varying, make_dataset({"x": np.float32([[2, 0], [3, 0]])}, None))
    halving = get_engine("onnxruntime").load(models.fails_on_odd_batch(), {"threads": 1})
    with pytest.raises(Unsupported, match=r"'y' has shape \[2, 4\] for 4 samples"):
        answers(halving, make_dataset({"x": np.ones((4, 2), np.float32)}, None))


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        ({"scores": SCORES}, RIGHT),
        ({"scores": SCORES, "more": SCORES[::-1]}, None),
        ({"box": SCORES[:, :, None]}, None),
    ],
    ids=["top-1", "agreement", "fidelity"],
)
def test_scores_are_the_accuracy_sample_by_sample(outputs: dict, labels: np.ndarray | None) -> None:
    judge = make_reference(outputs, labels)
    worse = {name: np.where(array > 4, -array, array) for name, array in outputs.items()}
    scores = judge.scores(worse)
    assert len(scores) == len(SCORES)
    assert scores.dtype == (np.float64 if judge.metric == "fidelity" else np.bool_)
    assert float(scores.mean()) == pytest.approx(judge.compare(worse).value)
    assert float(scores.mean()) < float(judge.scores(outputs).mean())


RANDOM = np.random.default_rng(0).normal(0, 3, (50, 5)).astype(np.float32)
NOISY = (RANDOM + np.random.default_rng(1).normal(0, 1, RANDOM.shape)).astype(np.float32)


def kl(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return stats.entropy(
        special.softmax(want.astype(float), axis=1), special.softmax(got.astype(float), axis=1), axis=1
    )


def test_the_divergence_of_class_scores_is_that_of_their_shares() -> None:
    reference = make_reference({"y": RANDOM}, None)
    np.testing.assert_allclose(reference.divergence({"y": NOISY}), kl(RANDOM, NOISY), rtol=1e-4)
    shares = special.softmax(RANDOM, axis=1)
    reference = make_reference({"y": shares}, None)
    np.testing.assert_allclose(
        reference.divergence({"y": special.softmax(NOISY, axis=1)}), kl(RANDOM, NOISY), rtol=1e-3
    )


def test_outputs_that_are_not_judged_do_not_count() -> None:
    known, outputs = {"y": RANDOM, "other": RANDOM}, {"y": RANDOM, "other": NOISY}
    labelled = make_reference(known, np.zeros(50, int))
    assert labelled.divergence(outputs).max() == 0
    np.testing.assert_allclose(make_reference(known, None).divergence(outputs), kl(RANDOM, NOISY), rtol=1e-4)


def test_the_divergence_of_other_outputs_is_their_relative_error() -> None:
    known, outputs = {"y": RANDOM[:, :, None]}, {"y": NOISY[:, :, None]}
    reference = make_reference(known, None)
    np.testing.assert_allclose(reference.divergence(outputs), sample_errors(known, outputs), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_no_number_diverges_most_and_stays_finite(bad: float) -> None:
    broken = RANDOM.copy()
    broken[3, 2] = bad
    found = make_reference({"y": RANDOM}, None).divergence({"y": broken})
    assert np.isfinite(found).all()
    assert found.argmax() == 3
    assert 15 < found[3] <= 28


def test_the_interval_of_hits_is_that_of_matched_pairs() -> None:
    reference = make_reference({"y": RANDOM}, np.zeros(50, int))
    rng = np.random.default_rng(0)
    for before, after in rng.random((20, 2, 40)) < rng.random((20, 2, 1)):
        want = paired_interval(before, after)
        found = reference.interval(before.astype(np.float32) - after)
        assert (found.value, found.low, found.high) == pytest.approx((want.value, want.low, want.high), abs=1e-6)
