from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import models
from penstock.artifact import Artifact
from penstock.errors import AlreadyExists, InvalidArgument, InvalidData, PenstockError, WrongResult
from penstock.offline.compress.job import Job
from penstock.offline.compress.method import Made, Method, StepContext
from penstock.offline.compress.methods.low_rank import LowRankMethod
from penstock.offline.compress.methods.prune import PruneMethod
from penstock.offline.compress.methods.share import ShareMethod

MODEL = models.linear(3, 2)
X = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)


def test_few_samples_are_a_remark() -> None:
    told: list[str] = []
    Job(PruneMethod(), MODEL, {"x": X[:2]}, tell=told.append)
    assert told == ["warning: the data has only 2 sample(s), so the result is unreliable; give a few hundred"]
    Job(PruneMethod(), MODEL, {"x": X}, tell=told.append)
    assert len(told) == 1


def test_without_data_to_measure_on_there_are_only_sizes() -> None:
    outcome = Job(PruneMethod(sparsity=0.5), MODEL).run()
    assert outcome.comparison is None
    assert outcome.coded is not None
    assert outcome.summary()["speedup"] is None


def test_without_data_to_measure_on_the_error_is_told_and_limited() -> None:
    (note,) = [one for one in Job(PruneMethod(sparsity=0.5), MODEL).run().notes if "differs by" in one]
    assert note.startswith("output 'y' of the compressed model differs by ")
    assert note.endswith("its accuracy is unknown without --evaluate")
    assert not any("differs by" in one for one in Job(PruneMethod(sparsity=0.5), MODEL, evaluate={"x": X}).run().notes)
    # The large weights of a layer decide its shared values, and one column of it is far smaller.
    weight = np.random.default_rng(0).standard_normal((40, 2)).astype(np.float32) * np.float32([[1e12, 1e-12]])
    down = np.float32([[0], [1]])  # only the small column is an answer
    net = models.artifact(
        [("MatMul", ["x", "w"], ["h"]), ("MatMul", ["h", "down"], ["y"])],
        [("x", TensorProto.FLOAT, ["N", 40])],
        [("y", TensorProto.FLOAT, ["N", 1])],
        {"w": weight, "down": down},
    )
    with pytest.raises(WrongResult, match=r"differs by .*no evaluation data: at most 1000%") as error:
        Job(ShareMethod(bits=2), net).run()
    assert "--evaluate" in (error.value.hint or "")


def test_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidData, match="no array for input"):
        Job(PruneMethod(), MODEL, {"y": X})


def test_files_are_checked_before_any_work(tmp_path: Path) -> None:
    notes, model = tmp_path / "notes.svg", tmp_path / "model.onnx"
    notes.write_text("mine")
    model.write_bytes(MODEL.data)
    with pytest.raises(AlreadyExists, match="is not a picture"):
        Job(PruneMethod(chart=str(notes)), model, {"x": X})
    with pytest.raises(InvalidArgument, match="would overwrite"):
        Job(PruneMethod(), model, output=model)
    with pytest.raises(InvalidArgument, match="measuring the sensitivity of each layer needs data"):
        Job(PruneMethod(per_layer=True), model)


Y = X @ models.linear_weight(3, 2)
FAST: list[Method] = [
    PruneMethod(sparsity=0.5, metric="mae"),
    LowRankMethod(rank=1, metric="mae"),
    ShareMethod(metric="mae"),
]


@pytest.mark.parametrize("method", FAST, ids=lambda method: type(method).__name__)
def test_every_method_judges_by_the_metric_that_is_asked_for(method: Method) -> None:
    found = Job(method, MODEL, {"x": X}, {"x": X, "labels": Y}).run().comparison
    assert found is not None
    assert found.accuracy.metric == "mae"
    assert found.original_accuracy == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"metric": "none"}, "there is no metric 'none'"),
        ({"metric_output": "z"}, "the model has no output 'z'"),
        ({"metric": "map"}, "the metric map fits no output"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_any_work(options: dict[str, str], cause: str) -> None:
    with pytest.raises(PenstockError, match=cause):
        Job(PruneMethod(**options), MODEL, {"x": X}, {"x": X, "labels": Y})  # type: ignore[arg-type]


def test_labels_that_the_original_does_not_know_are_trusted_if_told() -> None:
    wrong = {"x": X, "labels": 1 - (Y.argmax(axis=1))}
    with pytest.raises(InvalidData, match="chance"):
        Job(PruneMethod(), MODEL, {"x": X}, wrong)
    assert Job(PruneMethod(trust_labels=True), MODEL, {"x": X}, wrong).run().comparison is not None


def test_the_judged_output_of_several_is_told() -> None:
    told: list[str] = []
    model, labelled = models.two_linear(), {"x": X, "labels": Y.argmax(axis=1)}
    Job(PruneMethod(), model, labelled, labelled, tell=told.append)
    (note,) = told
    assert note.startswith("judging output 'y' by top-1: there are labels")
    Job(PruneMethod(metric_output="y"), model, labelled, labelled, tell=told.append)
    assert told == [note]


def test_a_metric_that_needs_labels_is_refused_without_them_before_any_work() -> None:
    with pytest.raises(InvalidData, match="the metric mae needs labels"):
        Job(PruneMethod(metric="mae"), MODEL, {"x": X}, {"x": X})


class TransposingMethod(Method, frozen=True, kw_only=True):
    """A method with a defect: the outputs lose their rows."""

    def run(self, model: Artifact, context: StepContext) -> Made:
        return Made(model.derive(models.linear(3, 1).data, "transpose", {}, {}))


@pytest.mark.parametrize("data", [{"x": X}, None])
def test_a_wrong_result_is_not_written(tmp_path: Path, data: dict[str, np.ndarray] | None) -> None:
    job = Job(TransposingMethod(), MODEL, data, output=tmp_path / "made.onnx")
    with pytest.raises(
        WrongResult, match=r"output 'y' of the compressed model, on inputs x \[\d+, 3\], has another type"
    ):
        job.run()
    assert not (tmp_path / "made.onnx").exists()
