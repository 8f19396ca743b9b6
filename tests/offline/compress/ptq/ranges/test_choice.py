"""The method of each tensor, chosen by the outputs of a trained network, with clean and with contaminated calibration data."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

import networks
from penstock.artifact import Artifact
from penstock.dataset import Dataset, load_dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.choice import (
    CANDIDATES,
    PER_TENSOR,
    RangeChoiceOptions,
    choose_ranges,
    distinct,
    output_harm,
)
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.accuracy import answers, make_reference
from penstock.offline.optimize.optimizer import optimize
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
    assert steps[-1][0] == steps[-1][1] == len(steps)
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
