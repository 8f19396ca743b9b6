from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from scipy import special, stats

import models
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.measurement import Interval
from penstock.offline.judge.accuracy import answers, make_reference, not_finite
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.intervals import bounded_interval, loss_bound, loss_interval, mean_bound, tail
from penstock.offline.judge.metrics import deviations, matched_pairs, mean_interval
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

RNG = np.random.default_rng
SCORES = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 5], [9, 0, 0]])
RIGHT = np.array([0, 1, 2, 0])


def test_top_1_counts_labels() -> None:
    judge = make_reference({"scores": SCORES}, RIGHT)
    worse = SCORES.copy()
    worse[3] = [0, 9, 0]
    found = judge.compare({"scores": worse})
    assert (found.metric, found.value, found.samples, found.lost, found.won) == ("top-1", 0.75, 4, 1, 0)
    assert found.loss == loss_interval(4, 1, 0)
    assert found.bound == loss_bound(4, 1, 0, tail())
    assert judge.compare({"scores": SCORES}).value == 1


@pytest.mark.parametrize("metric", ["", "f1"])
def test_candidates_have_the_cut_of_the_original(metric: str) -> None:
    """A probability may exceed 1 in a candidate, and logits may all be from 0 to 1 in one; neither moves the cut."""
    shares, logits, labels = np.float32([0.1, 0.3, 0.7, 0.9]), np.float32([-0.1, 0.3, 0.4, 0.9]), np.array([0, 0, 1, 1])
    for scores, changed, right in (
        (shares, shares + np.float32([0, 0, 0, 0.2]), labels),
        (logits, logits.clip(min=0), np.array([0, 1, 1, 1])),
    ):
        judge = make_reference({"y": scores}, right, metric)
        found = judge.compare({"y": changed})
        assert (found.value, found.loss.value, found.unjudged_error) == (1.0, 0.0, 0.0)
        assert f"scores above {judge.choice.cut:g} are class 1" in judge.choice.reason
    given = make_reference({"y": shares}, labels, metric, cut=0.0)
    assert given.choice.cut == 0.0
    assert given.original().value < 1


def test_a_candidate_may_be_better_than_the_original() -> None:
    judge = make_reference({"scores": SCORES}, np.array([0, 1, 2, 1]))
    better = SCORES.copy()
    better[3] = [0, 9, 0]
    found = judge.compare({"scores": better})
    assert found.loss.value == pytest.approx(-0.25)
    assert (found.lost, found.won) == (0, 1)


def test_intervals_hold_together_for_all_candidates() -> None:
    one, ten = (make_reference({"scores": SCORES}, RIGHT, looks=looks).compare({"scores": SCORES}) for looks in (1, 10))
    assert ten.loss.high > one.loss.high
    assert ten.bound == loss_bound(4, 0, 0, tail(10))
    assert ten.looks == 10


def test_the_original_loses_nothing() -> None:
    found = make_reference({"scores": SCORES}, np.array([0, 1, 1, 1])).original()
    assert found.value == 0.5
    assert (found.loss.low, found.loss.value, found.loss.high, found.relative_error) == (0, 0, 0, 0)


def test_without_labels_class_scores_are_judged_by_agreement_in_all_of_them() -> None:
    judge = make_reference({"scores": SCORES, "more_scores": SCORES[:, ::-1]}, None)
    assert judge.metric == "agreement"
    one, two = SCORES.copy(), SCORES[:, ::-1].copy()
    one[0], two[1] = [0, 0, 9], -two[1]
    found = judge.compare({"scores": one, "more_scores": SCORES[:, ::-1]})
    assert (found.value, found.loss.value) == (0.75, 0.25)
    assert judge.compare({"scores": one, "more_scores": two}).value == 0.5


def test_class_numbers_are_judged_by_agreement_not_by_relative_error() -> None:
    """One of 250 answers changed from class 900 to 2 is a loss of 0.4 %, however far apart the numbers are."""
    ids = np.arange(700, 950)
    changed = ids.copy()
    changed[200] = 2
    found = make_reference({"label": ids}, None).compare({"label": changed})
    assert (found.metric, found.loss.value) == ("agreement", pytest.approx(0.004))
    assert Contract(0.003).accuracy_objection(found)
    labelled = make_reference({"label": ids}, ids).compare({"label": changed})
    assert (labelled.metric, labelled.loss.value) == ("top-1", pytest.approx(0.004))


def test_a_mean_in_the_answers_does_not_hide_the_loss_of_a_regression() -> None:
    """Coordinates around 150 with an R² of 0.7: 3 % of the raw numbers, and the same highest column in every row."""
    want = (np.float32([140, 160]) + RNG(0).normal(0, 4, (200, 2))).astype(np.float32)
    got = (want + RNG(1).normal(0, 2.2, want.shape)).astype(np.float32)
    found = make_reference({"y": want}, None).compare({"y": got})
    assert found.metric == "fidelity"
    assert found.relative_error < 0.03
    assert found.loss.value > 0.4
    assert Contract().accuracy_objection(found)


def test_an_embedding_is_judged_by_the_cosine() -> None:
    want = RNG(0).normal(size=(100, 384)).astype(np.float32)
    got = (want + RNG(1).normal(0, 0.13, want.shape)).astype(np.float32)
    for scale in (1, np.linalg.norm(want, axis=1, keepdims=True)):
        found = make_reference({"sentence": want / scale}, None).compare({"sentence": got / scale})
        assert found.metric == "cosine"
        assert found.loss.value == pytest.approx(0.0083, abs=0.001)
        assert Contract(0.01).accuracy_objection(found) == ""


def test_scores_in_bfloat16_are_scores() -> None:
    judge = make_reference({"scores": SCORES.astype(ml_dtypes.bfloat16)}, RIGHT)
    assert judge.compare({"scores": SCORES.astype(ml_dtypes.bfloat16)}).value == 1


@pytest.mark.parametrize(
    "reference",
    [np.ones((4, 1), np.float32), np.ones((4, 2, 3), np.float32), np.ones(4, np.float32), SCORES],
    ids=["one column", "three axes", "one axis", "columns of any kind"],
)
def test_everything_else_is_judged_by_fidelity(reference: np.ndarray) -> None:
    judge = make_reference({"y": reference}, None)
    found = judge.compare({"y": reference + 2 * reference.max()})
    assert found.metric == "fidelity"
    assert found.value == pytest.approx(0)
    assert found.loss.value == pytest.approx(1)
    assert judge.original().value == 1


def test_a_few_large_differences_exceed_the_limit_although_fidelity_caps_them() -> None:
    answers = RNG(0).standard_normal((1000, 8)).astype(np.float32)
    wrong = answers.copy()
    wrong[:30] *= -20
    found = make_reference({"y": answers}, None, "fidelity").compare({"y": wrong})
    assert found.loss.value < 0.05
    assert found.unjudged_error > 3
    assert "output 'y' differs by" in Contract().accuracy_objection(found)


def test_fidelity_is_limited_by_the_output_error() -> None:
    reference = RNG(0).normal(size=(300, 5, 4)).astype(np.float32)
    found = make_reference({"y": reference}, None).compare({"y": reference * 1.05})
    assert found.loss.value == pytest.approx(0.05, rel=0.02)
    assert Contract().accuracy_objection(found) == ""
    assert "loses 4.94% fidelity" in Contract(0.5, max_output_error=0.04).accuracy_objection(found)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("labels", [RIGHT, None], ids=["top-1", "agreement"])
def test_an_answer_that_is_no_number_is_an_objection(bad: float, labels: np.ndarray | None) -> None:
    judge = make_reference({"scores": SCORES}, labels)
    broken = SCORES.copy()
    broken[2, 1] = bad
    found = judge.compare({"scores": broken})
    assert found.broken == "output 'scores' is NaN or infinite in 1 of 4 samples, first in sample 2"
    assert Contract(1.0, max_output_error=100.0).accuracy_objection(found) == found.broken
    assert all(np.isfinite([found.value, found.loss.low, found.loss.high, found.relative_error, found.bound]))
    np.testing.assert_array_equal(judge.scores({"scores": broken}), [1, 1, 0, 1])
    assert not_finite({"scores": SCORES}) == ""


def test_an_output_that_no_label_judges_is_held_to_the_original() -> None:
    reference = {"scores": SCORES, "embedding": np.ones((4, 8), np.float32)}
    found = make_reference(reference, RIGHT).compare({"scores": SCORES * 3, "embedding": np.zeros((4, 8), np.float32)})
    assert (found.metric, found.value) == ("top-1", 1.0)
    assert found.unjudged_output == "embedding"
    assert "output 'embedding' differs by" in Contract().accuracy_objection(found)
    fine = make_reference(reference, RIGHT).compare({**reference, "scores": SCORES * 3})
    assert Contract().accuracy_objection(fine) == ""


def test_labels_do_not_excuse_other_answers_than_the_originals() -> None:
    """Under labels that mean nothing, a ruined candidate loses nothing; its classes still differ from the original's."""
    rng = RNG(0)
    scores, noise = rng.normal(size=(2, 2000, 10)).astype(np.float32)
    found = make_reference({"scores": scores}, rng.integers(0, 10, 2000)).compare({"scores": scores + 2.5 * noise})
    assert abs(found.loss.value) < 0.03
    assert found.unjudged_error > 0.5
    assert "output 'scores' differs by" in Contract(0.03).accuracy_objection(found)


def test_boxes_and_text_are_held_to_the_original_by_their_own_metric() -> None:
    """Two boxes in another order, or one changed word in each of many sentences, are no other answer."""
    boxes = np.float32([[[0, 0, 10, 10, 0.9, 0], [20, 20, 40, 40, 0.8, 1]]]).repeat(30, axis=0)
    found = make_reference({"y": boxes}, boxes[..., [0, 1, 2, 3, 5]], "map").compare({"y": boxes[:, ::-1]})
    assert (found.value, found.unjudged_error) == (1.0, 0.0)
    words = np.array([" ".join(f"w{number}" for number in range(20))] * 30, object)
    other = np.array([text.replace("w3", "w5") for text in words], object)
    found = make_reference({"y": words}, words.astype(str), "wer").compare({"y": other})
    assert (found.loss.value, found.unjudged_error) == (0.05, 0.05)
    assert Contract(0.06).accuracy_objection(found) == ""


def test_a_named_metric_judges_a_named_output() -> None:
    outputs = {"a": RNG(0).normal(size=(50, 3)).astype(np.float32), "b": RNG(1).normal(size=(50, 3)).astype(np.float32)}
    labels = outputs["b"] + 0.1
    found = make_reference(outputs, labels, "mae", "b").compare({**outputs, "b": outputs["b"] - 0.1})
    assert found.value == pytest.approx(0.2, abs=1e-6)
    assert found.loss.value == pytest.approx(1.0, abs=1e-5)
    assert not found.is_share
    assert found.loss.low < 1 < found.loss.high


def test_lower_is_better_for_errors() -> None:
    y = RNG(0).normal(size=200).astype(np.float32)
    judge = make_reference({"y": y}, y + RNG(1).normal(size=200), "rmse")
    assert judge.compare({"y": y + 1}).loss.value > 0
    assert judge.compare({"y": (y + judge.labels) / 2}).loss.value == pytest.approx(-0.5)


def test_a_metric_that_fails_is_a_clear_error() -> None:
    judge = make_reference({"y": SCORES[:, :1]}, None, f"{__name__}:fails")
    with pytest.raises(InvalidData, match="the metric .*:fails failed: ZeroDivisionError"):
        judge.compare({"y": SCORES[:, :1]})
    for name, cause in {
        "nan": "is NaN or infinite",
        "partly_nan": "is NaN or infinite",
        "wrong": r"returned shape \[3\] for 4 samples",
        "ends": "SystemExit",
        "odd": "GeneratorExit",
        "huge": "is NaN or infinite",
    }.items():
        with pytest.raises(InvalidData, match=cause):
            make_reference({"y": SCORES[:, :1]}, None, f"{__name__}:{name}").original()


def test_a_metric_that_is_not_deterministic_is_refused() -> None:
    """Its losses would be noise, and the loss of the original itself not 0."""
    judge = make_reference({"y": RANDOM}, None, f"{__name__}:wavers")
    with pytest.raises(
        InvalidData, match="wavers is not deterministic: for the same outputs it is 0.1 at first, and 0.2"
    ):
        judge.check_metric()
    make_reference({"y": RANDOM}, None, f"{__name__}:is_positive").check_metric()


def wavers(output: np.ndarray, labels: object, calls: list[int] = []) -> float:  # noqa: B006 - a state
    calls.append(1)
    return len(calls) / 10


def test_an_interrupted_metric_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_reference({"y": SCORES[:, :1]}, None, f"{__name__}:interrupted").original()


def interrupted(output: np.ndarray, labels: object) -> float:
    raise KeyboardInterrupt


def odd(output: np.ndarray, labels: object) -> float:
    raise GeneratorExit  # not an Exception, but a BaseException


def huge(output: np.ndarray, labels: object) -> np.ndarray:
    return np.full(len(output), 1e308)


def ends(output: np.ndarray, labels: object) -> float:
    raise SystemExit(0)


def fails(output: np.ndarray, labels: object) -> float:
    return len(output) / 0


def nan(output: np.ndarray, labels: object) -> float:
    return float("nan")


def partly_nan(output: np.ndarray, labels: object) -> np.ndarray:
    return np.where(np.arange(len(output)) == 2, np.nan, 1.0)


def is_positive(output: np.ndarray, labels: object) -> np.ndarray:
    return (output[:, 0] > 0).astype(float)


def wrong(output: np.ndarray, labels: object) -> np.ndarray:
    return np.zeros(3)


def own(output: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return (np.abs(output[:, 0] - labels) < 1).astype(float)


def test_the_users_function_may_return_a_score_per_row() -> None:
    y = np.arange(40, dtype=np.float32)[:, None]
    judge = make_reference({"y": y}, np.arange(40), f"{__name__}:own")
    found = judge.compare({"y": np.where(y < 10, y + 5, y)})
    assert (found.value, found.loss.value) == (0.75, 0.25)


def test_text_differs_or_does_not() -> None:
    reference = {"y": np.array([[b"a", b"b"], [b"c", b"d"]], object)}
    judge = make_reference(reference, None)
    assert judge.compare(reference).value == 1
    found = judge.compare({"y": np.array([[b"a", b"b"], [b"x", b"y"]], object)})
    assert found.value == pytest.approx(0.5)


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
    padded = answers(varying, make_dataset({"x": np.float32([[2, 0], [3, 0]])}, None))["y"]
    assert padded.shape == (2, 3, 4)
    assert padded.sum(axis=(1, 2)).tolist() == [8, 12]
    halving = get_engine("onnxruntime").load(models.fails_on_odd_batch(), {"threads": 1})
    with pytest.raises(Unsupported, match=r"'y' has shape \[2, 4\] for 4 samples"):
        answers(halving, make_dataset({"x": np.ones((4, 2), np.float32)}, None))


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [
        ({"scores": SCORES}, RIGHT),
        ({"scores": SCORES, "more_scores": SCORES[::-1]}, None),
        ({"box": SCORES[:, :, None]}, None),
    ],
    ids=["top-1", "agreement", "fidelity"],
)
def test_scores_are_the_accuracy_sample_by_sample(outputs: dict, labels: np.ndarray | None) -> None:
    judge = make_reference(outputs, labels)
    worse = {name: np.where(array > 4, -array, array) for name, array in outputs.items()}
    scores = judge.scores(worse)
    assert len(scores) == len(SCORES)
    assert float(scores.mean()) == pytest.approx(judge.compare(worse).value)
    assert float(scores.mean()) < float(judge.scores(outputs).mean())


RANDOM = np.random.default_rng(0).normal(0, 3, (50, 5)).astype(np.float32)
NOISY = (RANDOM + np.random.default_rng(1).normal(0, 1, RANDOM.shape)).astype(np.float32)
CLASSES = np.arange(50) % 5


def kl(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return stats.entropy(
        special.softmax(want.astype(float), axis=1), special.softmax(got.astype(float), axis=1), axis=1
    )


def test_the_divergence_of_class_scores_is_that_of_their_shares() -> None:
    reference = make_reference({"logits": RANDOM}, None)
    np.testing.assert_allclose(reference.divergence({"logits": NOISY}), kl(RANDOM, NOISY), rtol=1e-4)
    shares = special.softmax(RANDOM, axis=1)
    reference = make_reference({"y": shares}, None)
    assert reference.proxy == "KL divergence"
    np.testing.assert_allclose(
        reference.divergence({"y": special.softmax(NOISY, axis=1)}), kl(RANDOM, NOISY), rtol=1e-3
    )


def test_outputs_that_are_not_judged_do_not_count() -> None:
    known, outputs = {"y": RANDOM, "other": RANDOM}, {"y": RANDOM, "other": NOISY}
    assert make_reference(known, CLASSES).divergence(outputs).max() == 0


def test_the_divergence_of_other_outputs_is_their_relative_error() -> None:
    known, outputs = {"y": RANDOM[:, :, None]}, {"y": NOISY[:, :, None]}
    reference = make_reference(known, None)
    assert reference.proxy == "relative error"
    np.testing.assert_allclose(reference.divergence(outputs), deviations(known["y"], outputs["y"]), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["logits", "y"])
def test_an_answer_that_is_no_number_diverges_most_and_stays_finite(name: str, bad: float) -> None:
    broken = NOISY.copy() * 0.001 + RANDOM
    broken[3, 2] = bad
    found = make_reference({name: RANDOM}, None).divergence({name: broken})
    assert np.isfinite(found).all()
    assert found.argmax() == 3


def test_the_error_is_that_of_the_worst_output() -> None:
    outputs = {"a": RANDOM, "b": RANDOM, "c": RANDOM}
    found = make_reference(outputs, CLASSES, "top-1", "a").compare({"a": RANDOM, "b": 1.5 * RANDOM, "c": 1.1 * RANDOM})
    assert found.relative_error == pytest.approx(0.5)
    assert found.unjudged_output == "b"
    # Relative to the spread of the rows, which is a little less than their norm.
    assert found.unjudged_error == pytest.approx(0.5, rel=0.1)
    for name, other in (("b", "c"), ("c", "b")):
        outputs = {"a": RANDOM, name: 1.2 * RANDOM, other: 1.1 * RANDOM}
        assert (
            make_reference(dict.fromkeys("abc", RANDOM), CLASSES, "top-1", "a").compare(outputs).unjudged_output == name
        )


def test_the_intervals_of_bounded_scores_are_those_of_their_mean() -> None:
    """The cosine is from -1 to 1. Without labels the original has 1, so that a candidate cannot gain."""
    want = RNG(0).normal(size=(60, 384)).astype(np.float32)
    got = (want + RNG(1).normal(0, 0.5, want.shape)).astype(np.float32)
    reference = make_reference({"e": want}, None, "cosine", looks=3)
    lost = reference.scores({"e": want}) - reference.scores({"e": got})
    found = reference.compare({"e": got})
    assert found.loss == bounded_interval(lost, 3, 0.0, 2.0)
    assert found.bound == mean_bound(lost, tail(3), 2.0)
    assert (found.lost, found.won, found.samples, found.is_share) == (0, 0, 60, False)
    labelled = make_reference({"e": want}, want + 1, "cosine")
    before, after = labelled.scores({"e": want}), labelled.scores({"e": got})
    found = labelled.compare({"e": got})
    assert found.loss == bounded_interval(before - after, 1, -2.0, 2.0)
    assert found.value == pytest.approx(float(after.mean()))


def test_scores_between_right_and_wrong_are_bounded_as_means() -> None:
    """One of four classes wrong in each of some samples: no counts of hits."""
    ids = np.tile(np.arange(4), (50, 1))
    changed = ids.copy()
    changed[:10, 0] = 9
    found = make_reference({"label": ids}, ids).compare({"label": changed})
    assert (found.lost, found.won, found.loss.value) == (0, 0, pytest.approx(0.05))
    assert found.bound == mean_bound(np.where(np.arange(50) < 10, 0.25, 0.0), tail(), 1.0)


def test_a_loss_of_an_error_is_a_fraction_and_of_a_score_a_difference() -> None:
    y = RNG(0).normal(size=200)
    truth = y + 0.5
    found = make_reference({"y": y}, truth, "mae").compare({"y": y - 0.25})
    assert (found.value, found.loss.value) == (pytest.approx(0.75), pytest.approx(0.5))
    assert found.bound == found.loss.high
    assert found.loss.low < 0.5 < found.loss.high
    assert (found.lost, found.won) == (0, 0)
    perfect = make_reference({"y": y}, y, "mae")
    assert perfect.compare({"y": y + 1}).loss.value == 1e6
    assert perfect.compare({"y": y + 1e-6}).loss.value == pytest.approx(1000)
    assert not perfect.is_exact
    assert make_reference({"scores": SCORES}, RIGHT).is_exact
    positive = RNG(1).integers(0, 2, 200)
    scores = positive + RNG(2).normal(0, 1, 200)
    reference = make_reference({"y": scores}, positive, "auc")
    found = reference.compare({"y": scores + RNG(3).normal(0, 3, 200)})
    assert found.loss.value == pytest.approx(reference.value({"y": scores}) - found.value)
    assert found.loss.value > 0


def test_the_jackknife_asks_for_the_candidates_that_are_judged() -> None:
    y = RNG(0).normal(size=200)
    one, ten = (make_reference({"y": y}, y + 0.5, "rmse", looks=looks).compare({"y": y - 0.1}) for looks in (1, 10))
    assert ten.loss.high > one.loss.high


def test_groups_without_which_a_metric_is_undefined_make_the_interval_wide() -> None:
    """With one positive sample, the area under the curve is undefined without it, so it tells little about others."""
    positive = (np.arange(60) == 17).astype(int)
    scores = positive + RNG(0).normal(0, 0.1, 60)
    found = make_reference({"y": scores}, positive, "auc").compare({"y": RNG(1).normal(size=60)})
    assert found.loss.low < found.loss.value < found.loss.high
    reversed_ = make_reference({"y": scores}, positive, "auc").compare({"y": -scores})
    assert reversed_.loss.value == 1
    assert (reversed_.loss.low, reversed_.loss.high) == (0, 2)  # All other groups agree.
    with pytest.raises(InvalidData, match="all labels are of one class"):
        make_reference({"y": scores}, positive, "auc").value({"y": scores}, np.zeros(60, int))


def test_a_function_that_takes_only_all_samples_has_a_wide_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jackknife learns nothing from parts on which the function fails. Their absence must not pass for certainty."""
    (tmp_path / "whole_table.py").write_text(
        "TRUTH = [row % 2 for row in range(100)]\n"
        "def rate(output, labels):\n"
        "    assert len(output) == len(TRUTH)\n"
        "    return float((output.argmax(axis=1) == TRUTH).mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    right = np.eye(2)[np.arange(100) % 2]
    made = np.where(np.arange(100)[:, None] < 20, right[:, ::-1], right)
    found = make_reference({"y": right}, None, "whole_table:rate").compare({"y": made})
    assert found.loss.value == pytest.approx(0.2)
    assert (found.loss.low, found.loss.high) == (pytest.approx(-0.8), pytest.approx(1.2))


def test_scores_of_what_is_no_mean_are_one_less_the_deviation() -> None:
    y = RNG(0).normal(size=(50, 1))
    reference = make_reference({"y": y}, y + 1, "rmse")
    got = y + np.where(np.arange(50)[:, None] < 5, 100, 0.1)
    np.testing.assert_allclose(reference.scores({"y": got}), 1 - deviations(y, got).clip(max=1))
    assert reference.scores({"y": got}).min() == 0


def test_each_sample_counts_by_its_worst_output() -> None:
    reference = make_reference({"a": RANDOM[:, :, None], "b": RANDOM[:, :, None]}, None, "fidelity")
    got = {
        "a": RANDOM[:, :, None] * 1.2,
        "b": np.where(np.arange(50)[:, None, None] < 25, 1.5, 1.0) * RANDOM[:, :, None],
    }
    each = [deviations(reference.answers[name], got[name]) for name in "ab"]
    np.testing.assert_array_equal(reference.divergence_of(got), np.maximum(*each))
    logits = make_reference({"a_logits": RANDOM, "b_logits": RANDOM}, None)
    both = logits.divergence({"a_logits": NOISY, "b_logits": NOISY})
    np.testing.assert_allclose(both, 2 * kl(RANDOM, NOISY), rtol=1e-4)


def test_samples_with_several_broken_outputs_have_no_score() -> None:
    reference = make_reference({"a_logits": RANDOM, "b_logits": RANDOM}, None)
    one, two = RANDOM.copy(), RANDOM.copy()
    one[3, 0], two[5, 1] = np.nan, np.inf
    scores = reference.scores({"a_logits": one, "b_logits": two})
    assert np.flatnonzero(scores == 0).tolist() == [3, 5]


def test_the_interval_of_differences_is_that_of_their_kind() -> None:
    differences = np.float32([1, 0, 0, -1, 1, 0])
    assert make_reference({"logits": RANDOM}, None).interval(differences) == matched_pairs(6, 1.0, 3.0)
    assert make_reference({"y": RANDOM[:, 0]}, None).interval(differences) == mean_interval(differences)


def test_the_originals_accuracy_has_all_figures() -> None:
    found = make_reference({"scores": SCORES}, RIGHT, looks=7).original()
    assert (found.bound, found.looks, found.samples, found.is_share) == (0.0, 7, 4, True)
    assert not make_reference({"y": RANDOM[:, 0]}, RANDOM[:, 0] + 1, "mae").original().is_share


def test_the_original_is_judged_by_labels_only_if_the_metric_has_them() -> None:
    assert make_reference({"scores": SCORES}, RIGHT, "agreement").labels is None
    assert make_reference({"scores": SCORES}, RIGHT, "top-1").labels is RIGHT
    assert make_reference({"scores": SCORES}, np.array([1, 1, 1, 1]), "agreement").original().value == 1


def test_single_scores_have_classes_but_no_divergence_of_classes() -> None:
    for scores in (RANDOM[:, :1], RANDOM[:, 0]):
        reference = make_reference({"y": scores}, CLASSES % 2, "top-1")
        assert reference.proxy == "relative error"
    assert make_reference({"y": RANDOM[:, :2]}, CLASSES % 2, "top-1").proxy == "KL divergence"
    assert make_reference({"y": CLASSES}, CLASSES, "top-1").proxy == "relative error"
    assert make_reference({"y": RANDOM}, None, "cosine").proxy == "relative error"
    assert make_reference({"y": special.softmax(RANDOM, axis=1)}, None, "cosine").proxy == "KL divergence"


def test_where_outputs_are_not_finite() -> None:
    broken = RANDOM.copy()
    broken[[4, 9], 2] = np.nan, np.inf
    outputs = {"text": np.array(["nan"] * 50, object), "ids": CLASSES, "fine": RANDOM, "y": broken}
    assert not_finite(outputs) == "output 'y' is NaN or infinite in 2 of 50 samples, first in sample 4"


def test_a_deviation_of_numbers_is_at_most_a_million() -> None:
    answers_ = {"scores": SCORES, "y": np.full((4, 3), 1e-30, np.float64)}
    found = make_reference(answers_, RIGHT, output="scores").compare({"scores": SCORES, "y": np.ones((4, 3))})
    assert found.unjudged_error == pytest.approx(1e6)


def test_a_deviation_of_boxes_is_one_less_their_precision() -> None:
    boxes = np.float32([[[0, 0, 10, 10, 0.9, 0]]]).repeat(30, axis=0)
    moved = boxes.copy()
    moved[:15, :, :4] += 100
    found = make_reference({"y": boxes}, boxes[..., [0, 1, 2, 3, 5]], "map").compare({"y": moved})
    assert found.unjudged_error == pytest.approx(1 - found.value)
    assert 0 < found.unjudged_error < 1


def test_a_broken_candidate_loses_everything() -> None:
    found = make_reference({"scores": SCORES}, RIGHT).compare({"scores": SCORES * np.nan})
    assert (found.value, found.loss, found.bound) == (0.0, Interval(1.0, 0.0, 1.0), 1.0)


def test_a_divergence_is_never_negative() -> None:
    """Scores that are all higher by the same have the same probabilities, but for rounding."""
    scores = RNG(0).normal(0, 3, (500, 7))
    found = make_reference({"logits": scores}, None).divergence({"logits": scores + 0.1})
    assert ((found >= 0) & (found < 1e-12)).all()


def test_samples_that_are_partly_right_are_not_counted_as_hits() -> None:
    ids = np.tile(np.arange(4), (50, 1))
    for right in (0, 10):
        labels = ids.copy()
        labels[right:, 0] = 9
        found = make_reference({"label": ids}, labels).compare({"label": ids})
        assert found.bound == mean_bound(np.zeros(50), tail(), 1.0)


def test_classes_within_the_first_five_are_still_other_classes() -> None:
    found = make_reference({"scores": RANDOM}, CLASSES, "top-5").compare({"scores": RANDOM[:, ::-1]})
    assert found.loss.value == 0
    assert found.unjudged_error == (RANDOM.argmax(axis=1) != RANDOM[:, ::-1].argmax(axis=1)).mean() > 0


def test_a_broken_candidate_keeps_the_unit_of_its_metric() -> None:
    assert make_reference({"scores": SCORES}, RIGHT).compare({"scores": SCORES * np.nan}).is_share
    y = RANDOM[:, 0]
    assert not make_reference({"y": y}, y + 1, "mae").compare({"y": y * np.nan}).is_share


def test_cosines_of_0_and_1_are_no_counts_of_hits() -> None:
    want = np.eye(4, dtype=np.float32)[np.arange(40) % 4]
    got = want.copy()
    got[:10] = np.roll(got[:10], 1, axis=1)
    found = make_reference({"e": want}, None, "cosine").compare({"e": got})
    assert found.loss == bounded_interval(np.where(np.arange(40) < 10, 1.0, 0.0), 1, 0.0, 2.0)
    assert (found.lost, found.won) == (0, 0)


def test_samples_that_were_partly_right_are_not_counted_as_won() -> None:
    ids = np.tile(np.arange(4), (50, 1))
    before = ids.copy()
    before[:10, 0] = 9
    found = make_reference({"label": before}, ids).compare({"label": ids})
    assert (found.value, found.lost, found.won) == (1, 0, 0)
    assert found.bound == mean_bound(np.where(np.arange(50) < 10, -0.25, 0.0), tail(), 1.0)


def test_a_function_without_labels_does_not_hide_a_deviation() -> None:
    y = np.arange(1, 41, dtype=np.float32)[:, None]
    found = make_reference({"y": y}, None, f"{__name__}:is_positive").compare({"y": 9 * y})
    assert found.loss.value == 0
    assert (found.unjudged_output, found.unjudged_error > 1) == ("y", True)


def test_an_output_beside_boxes_is_held_to_the_original_by_its_own_kind() -> None:
    boxes = np.float32([[[0, 0, 10, 10, 0.9, 0]]]).repeat(30, axis=0)
    y = RNG(0).normal(size=(30, 3)).astype(np.float32)
    reference = make_reference({"y": boxes, "z": y}, boxes[..., [0, 1, 2, 3, 5]], "map")
    found = reference.compare({"y": boxes, "z": y + 1})
    assert found.unjudged_output == "z"
    assert found.unjudged_error == pytest.approx(float(np.sqrt((deviations(y, y + 1) ** 2).mean())))


def test_other_class_scores_are_held_to_the_original_by_their_classes() -> None:
    other = RANDOM[: len(SCORES)]
    reference = make_reference({"scores": SCORES, "logits": other}, RIGHT, output="scores")
    assert reference.compare({"scores": SCORES, "logits": 9 * other}).unjudged_error == 0
    changed = other.copy()
    changed[0] = -changed[0]
    assert reference.compare({"scores": SCORES, "logits": changed}).unjudged_error == 0.25


def test_class_numbers_have_no_divergence_of_scores() -> None:
    ids = np.tile(np.arange(4), (50, 1))
    assert make_reference({"label": ids}, ids).proxy == "relative error"


@pytest.mark.parametrize("metric", ["top-1", "agreement", "mae"])
@pytest.mark.parametrize("repeats", [1, 3, 20])
def test_equal_calls_of_a_sequence_add_no_evidence(metric: str, repeats: int) -> None:
    rng = np.random.default_rng(repeats)
    scores = rng.standard_normal((40, 3)).astype(np.float32)
    changed = scores + rng.standard_normal((40, 3)).astype(np.float32)
    labels = scores if metric == "mae" else None if metric == "agreement" else scores.argmax(axis=1)
    alone = make_reference({"scores": scores}, labels, metric)
    more = make_reference(
        {"scores": scores.repeat(repeats, 0)},
        None if labels is None else labels.repeat(repeats, 0),
        metric,
        groups=np.arange(40).repeat(repeats),
    )
    one, other = alone.compare({"scores": changed}), more.compare({"scores": changed.repeat(repeats, 0)})
    assert (one.samples, one.lost, one.won) == (other.samples, other.lost, other.won)
    for name in ("value", "bound", "spread"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)
    np.testing.assert_allclose(
        [one.loss.value, one.loss.low, one.loss.high], [other.loss.value, other.loss.low, other.loss.high], rtol=1e-5
    )
    if metric != "mae":  # it is one number for all samples, so single samples have no score
        np.testing.assert_allclose(
            alone.scores({"scores": changed}), more.scores({"scores": changed.repeat(repeats, 0)})
        )


def test_a_sequence_counts_once_however_long_it_is() -> None:
    scores = np.eye(2, dtype=np.float32)[[0, 0, 0, 1]]
    judge = make_reference({"scores": scores}, np.array([0, 0, 0, 1]), groups=np.array([0, 0, 0, 1]))
    found = judge.compare({"scores": np.eye(2, dtype=np.float32)[[1, 0, 1, 1]]})
    assert found.value == pytest.approx((1 / 3 + 1) / 2)
    assert found.loss.value == pytest.approx(1 / 3)
    assert judge.scores({"scores": scores * np.float32([[np.nan], [1], [1], [1]])}).tolist() == [0, 1]
