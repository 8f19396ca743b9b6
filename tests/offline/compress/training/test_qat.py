"""Training computes the same outputs as ONNX Runtime, and recovers a model that lost accuracy by quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import networks
from networks import attention
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig, Unsupported
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.qat import QatOptions, agreement, train_quantized
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.accuracy import answers
from penstock.offline.optimize.optimizer import optimize
from penstock.samples.open import load_dataset
from penstock.tensor import DataType

DIGITS = Path(__file__).parents[4] / "examples" / "digits"
SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, False, "")


def int8(
    artifact: Artifact, data: Dataset, shrink: float = 1.0, placement: QdqPlacement = QdqPlacement.LINEAR
) -> Artifact:
    """Quantised by min-max; ``shrink`` reduces all ranges to this fraction, which clips larger values."""
    found = ranges(collect(artifact, data.inputs), RangeMethod.MIN_MAX, SCHEME)
    cut = {name: Range(range.low * shrink, range.high * shrink) for name, range in found.items()}
    return quantize(artifact, cut, SCHEME, placement)


def run(artifact: Artifact, data: Dataset) -> np.ndarray:
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1})
    (found,) = answers(loaded, data).values()
    loaded.unload()
    return found


def top1(logits: np.ndarray, data: Dataset) -> float:
    assert data.labels is not None
    return float((logits.argmax(axis=1) == data.labels).mean())


@pytest.fixture(scope="module")
def digits() -> tuple[Artifact, Dataset, Dataset]:
    artifact = Artifact.from_file(DIGITS / "model.onnx")
    loaded = get_engine("onnxruntime").load(artifact, {})
    train, test = (load_dataset(DIGITS / f"{name}.npz", loaded.signature) for name in ("calibrate", "evaluate"))
    return optimize(artifact, [train.rows(0, 8)])[0], train, test


def check_agreement(artifact: Artifact, data: Dataset) -> None:
    """The acceptance test: one step of the output on 95 % of the samples, and 0.1 points of the metric."""
    model = TrainableModel(artifact)
    for as_written in (False, True):
        assert agreement(model, artifact, data, as_written=as_written)["within_one_step"] >= 0.95, as_written
    with torch.no_grad():
        (ours,) = (value.numpy() for value in model({n: torch.tensor(a) for n, a in data.inputs.items()}).values())
    theirs = run(artifact, data)
    if data.labels is not None:
        assert abs(top1(ours, data) - top1(theirs, data)) <= 0.001


def test_clipped_ranges_are_won_back_and_torch_says_what_onnx_runtime_does(
    digits: tuple[Artifact, Dataset, Dataset],
) -> None:
    original, train, test = digits
    spoilt = int8(original, make_dataset(train.inputs, None), shrink=0.15)
    options = QatOptions(FitOptions(epochs=4, learning_rate=2e-3, batch_size=32, held_out=0.2))
    trained = train_quantized(spoilt, original, make_dataset(train.inputs, None), options)
    before, after = (top1(run(artifact, test), test) for artifact in (spoilt, trained))
    assert before < 0.5
    assert after > 0.95
    check_agreement(trained, test)
    step = trained.provenance[-1]
    assert step.name == "qat"
    assert step.source_digest == spoilt.digest
    assert step.facts["kept"] == "trained"
    assert step.facts["agreement"]["within_one_step"] >= 0.95
    assert len(trained.data) == pytest.approx(len(spoilt.data), rel=0.01)


def encoder_data(count: int, seed: int) -> Dataset:
    return make_dataset({"x": np.random.default_rng(seed).normal(size=(count, 5, 32)).astype(np.float32)}, None)


@pytest.mark.parametrize("placement", QdqPlacement)
def test_an_encoder_with_outliers(placement: QdqPlacement) -> None:
    """One channel that is a hundred times as large as the others uses all integers of its tensor; ranges that clip it help the
    rest."""
    scale = np.ones(32, np.float32)
    scale[3] = 100.0
    train, test = (make_dataset({"x": encoder_data(n, n).inputs["x"] * scale}, None) for n in (128, 64))
    original = attention()
    spoilt = int8(original, train, placement=placement)
    options = QatOptions(FitOptions(epochs=15, learning_rate=1e-3, batch_size=32, held_out=0.2))
    trained = train_quantized(spoilt, original, train, options)
    wanted = run(original, test)

    def error(artifact: Artifact) -> float:
        return float(np.square(run(artifact, test) - wanted).mean() / wanted.var())

    assert error(trained) < 0.9 * error(spoilt)
    check_agreement(trained, test)


def test_the_same_arguments_give_the_same_bytes(digits: tuple[Artifact, Dataset, Dataset]) -> None:
    original, train, _ = digits
    few = make_dataset(train.rows(0, 64), None)
    spoilt = int8(original, few, shrink=0.3)
    options = QatOptions(FitOptions(epochs=1, held_out=0.2))
    first, second = (train_quantized(spoilt, original, few, options) for _ in range(2))
    assert first.data == second.data
    assert first.provenance == second.provenance


def test_never_worse_than_the_start(digits: tuple[Artifact, Dataset, Dataset]) -> None:
    original, train, _ = digits
    few = make_dataset(train.rows(0, 64), None)
    start = int8(original, few)
    options = QatOptions(FitOptions(epochs=2, learning_rate=0.5, schedule="constant", held_out=0.5), frozen_after=0.0)
    trained = train_quantized(start, original, few, options)
    assert trained.data == start.data
    assert trained.provenance[-1].facts["kept"] == "start"
    assert trained.provenance[-1].facts["best_step"] == 0


def test_agreement_counts_in_steps_of_the_output() -> None:
    """Against itself with one output bias moved by ten steps."""
    n = networks.Network()
    n.op("Conv", n.conv("x", 4, 4), n.normal(4, 4, 3, 3, fan_in=36), name="y")
    images = np.random.default_rng(1).standard_normal((16, 4, 6, 6)).astype(np.float32)
    data = make_dataset({"x": images}, None)
    artifact = int8(n.artifact({"x": ["N", 4, 6, 6]}, {"y": ["N", 4, 4, 4]}), data, placement=QdqPlacement.WIDE)
    model = TrainableModel(artifact)
    exact = agreement(model, artifact, data)
    assert exact["within_one_step"] >= 0.95
    assert exact["largest"] <= 2
    scale = float(model.constant("y_scale"))
    model.value_hooks["y"] = lambda y: torch.cat([y[:4], y[4:] + 10 * scale])
    moved = agreement(model, artifact, data)
    assert moved["within_one_step"] == pytest.approx(0.25, abs=0.07)
    assert moved["largest"] == pytest.approx(10, abs=1.5)


def test_what_cannot_be_trained(digits: tuple[Artifact, Dataset, Dataset]) -> None:
    original, train, _ = digits
    with pytest.raises(Unsupported, match="no integer weights"):
        train_quantized(original, original, train)
    for wrong in (QatOptions(scale_rate=-1.0), QatOptions(frozen_after=2.0), QatOptions(FitOptions(epochs=0))):
        with pytest.raises(InvalidConfig):
            train_quantized(int8(original, train), original, train, wrong)
