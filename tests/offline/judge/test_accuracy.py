from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

import models
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidData, PenstockError, Unsupported
from penstock.offline.dataset import make_dataset
from penstock.offline.judge.accuracy import (
    answers,
    make_judge,
    output_errors,
    paired_interval,
    sample_errors,
    samples_needed,
)
from penstock.offline.judge.contract import Contract
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel

SCORES = np.float32([[3, 1, 0], [0, 2, 1], [1, 0, 5], [9, 0, 0]])
RIGHT = np.array([0, 1, 2, 0])


def test_the_interval_is_that_of_agresti_and_min() -> None:
    # 100 pairs, 5 lost and 1 won. By hand: n = 102, b = 5.5, c = 1.5, centre 4 / 102,
    # spread 1.959964 * sqrt(7 - 16 / 102) / 102.
    before = np.repeat([True, True, False, False], [60, 5, 1, 34])
    after = np.repeat([True, False, True, False], [60, 5, 1, 34])
    interval = paired_interval(before, after)
    assert interval.value == pytest.approx(0.04)
    assert interval.low == pytest.approx(0.0392157 - 0.0502655, abs=1e-6)
    assert interval.high == pytest.approx(0.0392157 + 0.0502655, abs=1e-6)


def test_no_difference_still_has_an_interval() -> None:
    hits = np.ones(100, bool)
    interval = paired_interval(hits, hits)
    # By hand: spread 1.959964 * sqrt(1) / 102.
    assert (interval.low, interval.value, interval.high) == pytest.approx((-0.0192153, 0, 0.0192153), abs=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=300))
def test_the_interval_is_antisymmetric_and_holds_the_loss(pairs: list[tuple[bool, bool]]) -> None:
    before, after = np.array(pairs).T
    loss, gain = paired_interval(before, after), paired_interval(after, before)
    assert loss.low <= loss.value <= loss.high
    assert (loss.low, loss.value, loss.high) == pytest.approx((-gain.high, -gain.value, -gain.low))


def test_top_1_counts_labels() -> None:
    judge = make_judge({"scores": SCORES}, RIGHT)
    worse = SCORES.copy()
    worse[3] = [0, 9, 0]
    found = judge.compare({"scores": worse})
    assert (found.metric, found.value, found.samples) == ("top-1", 0.75, 4)
    assert found.loss.value == pytest.approx(0.25)
    assert judge.compare({"scores": SCORES}).value == 1


def test_a_candidate_may_be_better_than_the_original() -> None:
    judge = make_judge({"scores": SCORES}, np.array([0, 1, 2, 1]))
    better = SCORES.copy()
    better[3] = [0, 9, 0]
    assert judge.compare({"scores": better}).loss.value == pytest.approx(-0.25)


def test_the_original_loses_nothing() -> None:
    found = make_judge({"scores": SCORES}, np.array([0, 1, 1, 1])).original()
    assert found.value == 0.5
    assert (found.loss.low, found.loss.value, found.loss.high, found.relative_error) == (0, 0, 0, 0)


def test_without_labels_scores_are_judged_by_agreement() -> None:
    judge = make_judge({"scores": SCORES, "more": SCORES[:, ::-1]}, None)
    assert judge.metric == "agreement"
    one, two = SCORES.copy(), SCORES[:, ::-1].copy()
    one[0], two[1] = [0, 0, 9], -two[1]
    found = judge.compare({"scores": one, "more": SCORES[:, ::-1]})
    assert (found.value, found.loss.value) == (0.75, 0.25)
    assert judge.compare({"scores": one, "more": two}).value == 0.5


def test_without_labels_scores_beside_another_output_are_judged_by_fidelity() -> None:
    assert make_judge({"hidden": np.zeros((4, 2, 2), np.float32), "scores": SCORES}, None).metric == "fidelity"


def test_scores_in_bfloat16_are_scores() -> None:
    judge = make_judge({"scores": SCORES.astype(ml_dtypes.bfloat16)}, RIGHT)
    assert judge.compare({"scores": SCORES.astype(ml_dtypes.bfloat16)}).value == 1


@pytest.mark.parametrize(
    "reference",
    [np.ones((4, 1), np.float32), np.ones((4, 2, 3), np.float32), np.ones(4, np.float32), np.ones((4, 3), np.int64)],
    ids=["one column", "three axes", "one axis", "integers"],
)
def test_everything_else_is_judged_by_fidelity(reference: np.ndarray) -> None:
    judge = make_judge({"y": reference}, None)
    found = judge.compare({"y": reference * 2})
    assert found.metric == "fidelity"
    assert found.value == pytest.approx(0)
    assert found.loss.value == pytest.approx(1)
    assert judge.original().value == 1


def test_fidelity_is_one_less_the_mean_error_with_its_interval() -> None:
    reference = np.ones((4, 1), np.float32)
    errors = np.float32([[0.0], [0.1], [0.2], [0.3]])
    found = make_judge({"y": reference}, None).compare({"y": reference + errors})
    assert found.value == pytest.approx(0.85)
    # Standard deviation of the errors 0.129099, of their mean half of that.
    assert (found.loss.low, found.loss.high) == pytest.approx((0.15 - 0.126516, 0.15 + 0.126516), abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("labels", [RIGHT, None], ids=["top-1", "agreement"])
def test_broken_answers_are_numbers_all_the_same(bad: float, labels: np.ndarray | None) -> None:
    judge = make_judge({"scores": SCORES}, labels)
    found = judge.compare({"scores": np.full_like(SCORES, bad)})
    assert found.loss.value > 0
    assert found.relative_error >= 1
    assert all(np.isfinite([found.value, found.loss.low, found.loss.high, found.relative_error]))


def test_nan_is_a_miss_even_where_it_would_be_picked() -> None:
    scores = SCORES.copy()
    scores[0, 0] = np.nan
    assert make_judge({"scores": SCORES}, RIGHT).compare({"scores": scores}).value == 0.75


def test_infinity_that_the_original_has_as_well_is_no_error() -> None:
    masked = SCORES.copy()
    masked[:, 2] = -np.inf
    judge = make_judge({"scores": masked}, None)
    found = judge.compare({"scores": masked.copy()})
    assert (found.value, found.relative_error) == (1, 0)


@given(
    stn.arrays(np.float32, (5, 3), elements=st.floats(width=32)),
    stn.arrays(np.float32, (5, 3), elements=st.floats(width=32)),
)
def test_errors_are_finite_whatever_the_answers(reference: np.ndarray, other: np.ndarray) -> None:
    errors = sample_errors({"y": reference}, {"y": other})
    assert ((errors >= 0) & (errors <= 1)).all()
    assert 0 <= output_errors({"y": reference}, {"y": other})["y"] <= 1e6
    assert output_errors({"y": reference}, {"y": reference})["y"] == 0


def test_errors_of_doubles_at_the_end_of_their_range() -> None:
    huge = np.full((2, 2), 1e308)
    assert output_errors({"y": huge}, {"y": -huge})["y"] <= 1e6
    assert output_errors({"y": np.zeros((2, 2))}, {"y": huge})["y"] == 1e6


def test_errors_count_all_outputs() -> None:
    reference = {"large": np.float32([[300.0]]), "small": np.float32([[4.0]])}
    other = {"large": np.float32([[300.0]]), "small": np.float32([[3.0]])}
    assert output_errors(reference, other) == pytest.approx({"large": 0.0, "small": 0.25})
    assert sample_errors(reference, other) == pytest.approx([0.25])


def test_an_output_that_no_label_judges_is_held_against_the_contract() -> None:
    reference = {"scores": SCORES, "embedding": np.ones((4, 8), np.float32)}
    found = make_judge(reference, RIGHT).compare({"scores": SCORES * 3, "embedding": np.zeros((4, 8), np.float32)})
    assert (found.metric, found.value) == ("top-1", 1.0)
    assert (found.unjudged_output, found.unjudged_error) == ("embedding", pytest.approx(1.0))
    assert "output 'embedding' is off by 100%" in Contract().accuracy_objection(found)
    fine = make_judge(reference, RIGHT).compare({**reference, "scores": SCORES * 3})
    assert Contract().accuracy_objection(fine) == ""


def test_rounding_beside_zeros_is_no_error() -> None:
    reference = {"y": np.zeros((2, 3), np.float32)}
    assert sample_errors(reference, {"y": np.full((2, 3), 1e-9, np.float32)}).max() < 0.01


def test_text_differs_or_does_not() -> None:
    reference = {"y": np.array([[b"a", b"b"], [b"c", b"d"]], object)}
    judge = make_judge(reference, None)
    assert judge.compare(reference).value == 1
    found = judge.compare({"y": np.array([[b"a", b"b"], [b"x", b"y"]], object)})
    assert found.value == pytest.approx(0.5)


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(InvalidData, match=r"labels go up to 7.*\{'scores': \[4, 3\]\}"):
        make_judge({"scores": SCORES}, np.array([0, 1, 2, 7]))
    with pytest.raises(InvalidData, match="labels go up to 2"):
        make_judge({"classes": RIGHT}, RIGHT)


def test_the_output_with_enough_classes_is_judged() -> None:
    assert make_judge({"two": np.ones((4, 2), np.float32), "scores": SCORES}, RIGHT).output == "scores"


def test_answers_of_another_shape_are_refused() -> None:
    with pytest.raises(PenstockError, match=r"'scores' has shape \[4, 2\], the original's \[4, 3\]"):
        make_judge({"scores": SCORES}, RIGHT).compare({"scores": SCORES[:, :2]})


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
    with pytest.raises(Unsupported, match="differs in shape from sample to sample"):
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
    judge = make_judge(outputs, labels)
    worse = {name: np.where(array > 4, -array, array) for name, array in outputs.items()}
    scores = judge.scores(worse)
    assert len(scores) == len(SCORES)
    assert scores.dtype == (np.float64 if judge.metric == "fidelity" else np.bool_)
    assert float(scores.mean()) == pytest.approx(judge.compare(worse).value)
    assert float(scores.mean()) < float(judge.scores(outputs).mean())


@given(max_loss=st.floats(0.005, 1), share=st.floats(-1, 0.9), changed=st.floats(0, 0.5))
def test_samples_needed_are_enough_and_one_less_is_not(max_loss: float, share: float, changed: float) -> None:
    loss = share * max_loss
    count = samples_needed(max_loss, loss, changed)
    assert count is not None
    moved = max(changed, abs(loss))

    def bound(samples: int) -> float:
        """The interval's upper end, written out for expected counts that need not be whole."""
        n, b, c = samples + 2, samples * (moved + loss) / 2 + 0.5, samples * (moved - loss) / 2 + 0.5
        return float((b - c) / n + 1.959964 * np.sqrt(b + c - (b - c) ** 2 / n) / n)

    assert bound(count) <= max_loss
    assert count == 1 or bound(count - 1) > max_loss


def test_samples_needed_in_plain_figures() -> None:
    # Nothing changes: (1 + 1 pseudo pair) with a spread of 1.96 / (n + 2) below one point takes 194 samples.
    assert samples_needed(0.01, changed=0.0) == 194
    assert samples_needed(0.01) == 812
    assert samples_needed(0.01, loss=0.01) is None
    with pytest.raises(InvalidArgument, match="not possible"):
        samples_needed(0.0)


def test_samples_needed_agree_with_the_interval() -> None:
    # 1,000 samples of which 10 are lost and 10 won prove less than one point; 500 of which 5 and 5 do not.
    for count, proves in ((1000, True), (500, False)):
        before, after = np.ones(count, bool), np.ones(count, bool)
        before[: count // 100] = False
        after[-(count // 100) :] = False
        assert (paired_interval(before, after).high <= 0.01) == proves
        needed = samples_needed(0.01, 0.0, 0.02)
        assert needed is not None
        assert (count >= needed) == proves
