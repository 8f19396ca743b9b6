"""The method of each tensor, chosen by the outputs of a trained network, with clean and with contaminated calibration data."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import networks
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import (
    CANDIDATES,
    PER_TENSOR,
    RangeChoiceOptions,
    TensorChoice,
    choose_ranges,
    distinct,
    output_harm,
)
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.accuracy import answers, answers_of, make_reference
from penstock.offline.optimize.optimizer import optimize
from penstock.samples.open import load_dataset
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
FOLDER = Path(__file__).parents[5] / "examples" / "digits"


@functools.cache
def digits() -> tuple[Artifact, Dataset, Dataset]:
    """The optimised model, calibration data of which a tenth is forty times too large, and evaluation data."""
    original = Artifact.from_file(FOLDER / "model.onnx")
    signature = get_engine("onnxruntime").load(original, {}).signature
    clean, evaluation = (load_dataset(FOLDER / f"{name}.npz", signature) for name in ("calibrate", "evaluate"))
    images = clean.inputs["image"].copy()
    images[np.random.default_rng(3).choice(len(images), len(images) // 10, replace=False)] *= 40
    optimised, _ = optimize(original, [clean.rows(0, 4)])
    return optimised, make_dataset({"image": images}, None), evaluation


def accuracy(quantised: Artifact) -> float:
    original, _, evaluation = digits()
    before, after = (get_engine("onnxruntime").load(model, {"threads": 1}) for model in (original, quantised))
    return make_reference(answers(before, evaluation), evaluation.labels).compare(answers(after, evaluation)).value


def test_contaminated_calibration_costs_min_max_more() -> None:
    artifact, contaminated, _ = digits()
    statistics = collect(artifact, contaminated.inputs)
    found = {
        name: accuracy(quantize(artifact, ranges(statistics, method, SCHEME, percent), SCHEME))
        for name, (method, percent) in CANDIDATES.items()
    }
    choice = choose_ranges(artifact, statistics, contaminated, SCHEME)
    chosen = accuracy(quantize(artifact, choice.ranges, SCHEME))
    assert found["entropy"] >= found["min-max"] + 0.005
    assert chosen >= found["min-max"] + 0.005
    # 797 samples: four of them are half a point, which is within the interval of equal models.
    assert chosen >= max(found.values()) - 0.005
    assert {one.method for one in choice.tensors.values()} != {"min-max"}


def test_the_choice_is_reported_and_repeatable() -> None:
    artifact, data = networks.cnn(8), make_dataset({"x": networks.images(12)}, None)
    statistics = collect(artifact, data.inputs)
    steps: list[tuple[int, int]] = []
    choice = choose_ranges(artifact, statistics, data, SCHEME, progress=lambda *step: steps.append(step))
    assert choice == choose_ranges(artifact, statistics, data, SCHEME)
    assert set(choice.ranges) == set(choice.tensors) == set(statistics)
    assert set(choice.errors) == {PER_TENSOR, *CANDIDATES}
    assert choice.errors[choice.method] == min(choice.errors.values())
    assert steps == [(number, len(steps)) for number in range(1, len(steps) + 1)]
    for one in choice.tensors.values():
        best = min(one.tried, key=lambda tried: tried.error)
        assert (one.method, one.range) == (best.method, best.range)
    # Logits are not clipped, so there is nothing to choose.
    assert choice.tensors["y"].method == "min-max"
    assert not choice.tensors["y"].measured
    assert any(one.measured for one in choice.tensors.values())


@pytest.mark.parametrize("options", [RangeChoiceOptions(max_calls=1), RangeChoiceOptions(time_s=0.0)])
def test_without_budget_a_tensors_own_squared_error_decides(options: RangeChoiceOptions) -> None:
    artifact, data = networks.cnn(8), make_dataset({"x": networks.images(12)}, None)
    statistics = collect(artifact, data.inputs)
    choice = choose_ranges(artifact, statistics, data, SCHEME, options=options)
    assert not any(one.measured for one in choice.tensors.values())
    mse = ranges(statistics, RangeMethod.MSE, SCHEME)
    for name, one in choice.tensors.items():
        own = {tried.method: tried.error for tried in one.tried}
        if "mse" in own:
            assert one.range == mse[name] or own[one.method] < own["mse"]


def test_fixed_batches_and_two_inputs_of_nothing() -> None:
    artifact, data = networks.cnn(8, batch=4), make_dataset({"x": networks.images(12)}, None)
    choice = choose_ranges(artifact, collect(artifact, data.inputs), data, SCHEME, options=RangeChoiceOptions(rows=1))
    assert quantize(artifact, choice.ranges, SCHEME).size_bytes
    with pytest.raises(InvalidArgument, match="must be at least 1, got 0"):
        choose_ranges(artifact, {}, data, SCHEME, options=RangeChoiceOptions(rows=0))


def test_alike_ranges_are_tried_once() -> None:
    candidates = {
        "a": Range(-1.0, 1.0),
        "b": Range(-0.99, 1.01),
        "c": Range(-1.0, 1.03),
        "d": Range(0.0, 0.0),
        "e": Range(0.0, 0.0),
    }
    assert list(distinct(candidates)) == ["a", "c", "d"]


def test_harm_of_scores_is_their_angle_and_of_the_rest_their_error() -> None:
    scores = np.float32([[3, 1, 2], [0, 5, 1]])
    assert output_harm({"y": scores}, {"y": 7 * scores + 2}) == pytest.approx(0, abs=1e-9)
    assert output_harm({"y": scores}, {"y": scores[:, ::-1].copy()}) > 0.1
    assert output_harm({"y": scores}, {"y": np.full_like(scores, np.nan)}) == 1
    two = scores[:, :2]
    assert output_harm({"y": two}, {"y": 1.1 * two}) == pytest.approx(0.1, rel=1e-5)
    assert output_harm({"y": scores, "z": two}, {"y": scores, "z": 1.1 * two}) == pytest.approx(0.1, rel=1e-5)
    assert output_harm({"y": scores, "z": two}, {"y": scores, "z": two[:, :1]}) == 1
    three = np.stack([scores, scores], axis=2)
    assert output_harm({"y": three}, {"y": 1.1 * three}) == pytest.approx(0.1, rel=1e-5)
    for array in (scores, two):
        assert output_harm({"y": array}, {"y": array[:, 1:]}) == output_harm({"y": array}, {"y": array.ravel()}) == 1


def test_outputs_without_an_axis_for_samples_are_rows_of_single_samples() -> None:
    n = networks.Network()
    hidden = n.op("Relu", n.gemm("x", 16, 8))
    n.op("Squeeze", n.gemm(hidden, 8, 4), n.weight(np.array([0])), name="y")
    artifact = n.artifact({"x": [1, 16]}, {"y": [4]})
    x = np.random.default_rng(0).standard_normal((200, 16)).astype(np.float32)
    x[0] *= 40
    data = make_dataset({"x": x}, None)
    found = choose_ranges(artifact, collect(artifact, data), data, SCHEME)
    assert any(choice.measured for choice in found.tensors.values())


def test_harm_of_a_sample_is_that_of_its_worst_output() -> None:
    scores = np.float32([[3, 1, 2], [0, 5, 1]])
    turned = scores * np.float32([[-1], [1]])  # the first sample by 180 degrees, of which 1 - cosine is 2
    assert output_harm({"y": scores, "z": scores}, {"y": turned, "z": scores}) == pytest.approx(1)
    assert output_harm({"y": scores, "z": scores}, {"y": turned, "z": turned}) == pytest.approx(1)


def test_harm_ignores_a_number_that_is_added_to_all_scores_of_a_sample() -> None:
    scores = np.float32([[3, 1, 2], [0, 5, 1]])
    assert output_harm({"y": scores}, {"y": scores + np.float32([[2], [-5]])}) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_scores_without_an_angle_do_full_harm_and_warn_of_nothing(sign: int) -> None:
    flat, tiny = np.ones((1, 3), np.float32), np.array([[1e-170, 0, -1e-170]])  # whose norm underflows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert output_harm({"y": flat}, {"y": flat}) == 1
        assert output_harm({"y": tiny}, {"y": sign * 1e180 * tiny}) == 1


@given(*(st.integers(-60, 0) for _ in range(2)), *(st.integers(0, 60) for _ in range(2)), st.integers(0, 40))
def test_alike_is_mutual_and_independent_of_size_and_sign(
    low: int, low2: int, high: int, high2: int, size: int
) -> None:
    def are_apart(one: Range, other: Range) -> bool:
        return len(distinct({"one": one, "other": other})) == 2

    one, other = Range(float(low), float(high)), Range(float(low2), float(high2))
    expected = max(abs(low - low2), abs(high - high2)) * 100 >= max(high - low, high2 - low2) > 0
    assert are_apart(one, other) == are_apart(other, one) == expected
    assert are_apart(*(Range(each.low * 2**size, each.high * 2**size) for each in (one, other))) == expected
    assert are_apart(*(Range(-each.high, -each.low) for each in (one, other))) == expected


def test_ranges_that_differ_by_a_hundredth_are_both_tried() -> None:
    assert list(distinct({"a": Range(0.0, 100.0), "b": Range(0.0, 99.0)})) == ["a", "b"]


def test_percentiles_are_those_of_their_names() -> None:
    for name, (method, percent) in CANDIDATES.items():
        assert name == (f"percentile-{percent}" if method is RangeMethod.PERCENTILE else name)
        assert percent == 100 or method is RangeMethod.PERCENTILE


MLP = networks.mlp(16)
LONG = make_dataset({"x": np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32) ** 5}, None)


def test_tensors_with_a_range_of_their_own_and_several_candidates_are_measured() -> None:
    """The input and the results of the activation functions have one, in contrast to those of the products before them."""
    choice = choose_ranges(MLP, collect(MLP, LONG), LONG, SCHEME)
    assert all(len(one.tried) > 1 for name, one in choice.tensors.items() if name != "y")
    assert {name for name, one in choice.tensors.items() if one.measured} == {"x", "hidden", "relu3"}


@pytest.mark.parametrize("power", [0, 3])
def test_a_tensor_with_one_candidate_or_the_range_of_another_is_not_measured(power: int) -> None:
    n = networks.Network()
    even = n.op("Conv", "x", n.normal(4, 2, 1, 1), name="even")
    n.op("Conv", n.op("MaxPool", even, kernel_shape=[1, 1], name="passed"), n.normal(4, 4, 1, 1), name="y")
    artifact = n.artifact({"x": ["N", 2, 4, 4]}, {"y": ["N", 4, 4, 4]})
    x = np.random.default_rng(0).standard_normal((32, 2, 4, 4)).astype(np.float32)
    data = make_dataset({"x": np.sign(x) * np.abs(x) ** power}, None)
    choice = choose_ranges(artifact, collect(artifact, data), data, SCHEME, QdqPlacement.WIDE)
    for name, one in choice.tensors.items():
        assert one.measured == (name in ("x", "even") and len(one.tried) > 1)
        assert one.measured or len(one.tried) > 1 or [tried.error for tried in one.tried] == [0.0]
    counts = {name: len(one.tried) for name, one in choice.tensors.items()}
    assert (counts["x"] > 1, counts["passed"] > 1) == ((False, False) if power == 0 else (True, True))


def test_errors_are_the_harms_of_the_whole_quantised_models() -> None:
    statistics = collect(MLP, LONG)
    choice = choose_ranges(MLP, statistics, LONG, SCHEME, options=RangeChoiceOptions(rows=64))
    before = answers_of(MLP, LONG, as_written=True)
    for name, (method, percent) in CANDIDATES.items():
        made = quantize(MLP, ranges(statistics, method, SCHEME, percent), SCHEME)
        assert choice.errors[name] == pytest.approx(
            output_harm(before, answers_of(made, LONG, as_written=True)), rel=0.05
        )


def test_without_budget_the_error_is_that_of_rounding_the_tensor() -> None:
    choice = choose_ranges(MLP, collect(MLP, LONG), LONG, SCHEME, options=RangeChoiceOptions(max_calls=1))
    x = LONG.inputs["x"].astype(np.float64)
    assert len(choice.tensors["x"].tried) == 2
    for one in choice.tensors["x"].tried:
        scale = (one.range.high - one.range.low) / 255
        error = np.square(np.round(x.clip(one.range.low, one.range.high) / scale) * scale - x).mean()
        assert one.error == pytest.approx(error, rel=0.1)


def test_the_budget_is_spent_to_the_last_call_on_the_tensors_that_differ_most_first() -> None:
    statistics = collect(MLP, LONG)

    def measured(**limits: float) -> dict[str, TensorChoice]:
        choice = choose_ranges(MLP, statistics, LONG, SCHEME, options=RangeChoiceOptions(**limits))  # type: ignore[arg-type]
        return {name: one for name, one in choice.tensors.items() if one.measured}

    everything = measured()
    calls = 1 + sum(len(one.tried) for one in everything.values())
    assert measured(max_calls=calls, time_s=1000.0) == everything
    assert len(measured(max_calls=calls - 1)) == len(everything) - 1

    def spread(name: str) -> float:
        first, *others = (one.range for one in everything[name].tried)
        return max(
            max(abs(first.low - one.low), abs(first.high - one.high)) / max(first.high - first.low, one.high - one.low)
            for one in others
        )

    widest = max(everything, key=spread)
    assert list(measured(max_calls=1 + len(everything[widest].tried))) == [widest]


@pytest.mark.parametrize(("batch", "rows", "used"), [("N", 5, 5), (4, 7, 4), (4, 2, 4), ("N", 99, 12)])
def test_ranges_are_tried_on_evenly_spaced_rows(batch: int | str, rows: int, used: int) -> None:
    artifact, data = networks.cnn(8, batch), make_dataset({"x": networks.images(12)}, None)
    statistics = collect(artifact, data)
    options = RangeChoiceOptions(rows=rows, max_calls=1)
    expected = choose_ranges(artifact, statistics, data.pick_evenly(used), SCHEME, options=RangeChoiceOptions(12, 1))
    assert choose_ranges(artifact, statistics, data, SCHEME, options=options) == expected
