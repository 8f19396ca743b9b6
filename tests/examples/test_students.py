"""The student architectures have the documented form, learn, and can be searched by width and depth."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.samples.open import load_dataset
from penstock.tensor import Signature

pytest.importorskip("torch", reason="students are trained with torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits"
TEACHER = Artifact.from_file(DIGITS / "model.onnx")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of ``examples/students``; the scripts import one another from their common folder."""
    monkeypatch.syspath_prepend(EXAMPLES / "students")
    return importlib.import_module


@pytest.fixture(scope="module")
def signature() -> Signature:
    loaded = get_engine("onnxruntime").load(TEACHER, {"threads": 1})
    loaded.unload()
    return loaded.signature


@pytest.fixture
def data(signature: Signature) -> Dataset:
    return load_dataset(DIGITS / "calibrate.npz", signature)


@pytest.mark.parametrize("student", ["depthwise", "encoder"])
def test_students_have_the_teachers_inputs_and_outputs(
    modules: Any, signature: Signature, data: Dataset, student: str
) -> None:
    build = modules("students").STUDENTS[student]
    artifact = build(signature, 8, 2)
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1})
    assert loaded.signature == signature
    scores = loaded.forward(data.rows(0, 5))["logits"]
    assert scores.shape == (5, 10)
    assert np.ptp(scores, axis=0).min() > 0
    assert artifact.data == build(signature, 8, 2).data != build(signature, 8, 2, seed=1).data
    assert artifact.size_bytes < build(signature, 16, 2).size_bytes
    assert artifact.size_bytes < build(signature, 8, 3).size_bytes


def test_augmentation_moves_images_by_a_pixel_at_most(modules: Any) -> None:
    shifted = modules("distil").shifted
    image = np.zeros((1, 1, 8, 8), np.float32)
    image[0, 0, 4, 4] = 1
    places = {
        tuple(np.argwhere(shifted({"image": image}, np.random.default_rng(seed))["image"])[0, 2:].tolist())
        for seed in range(99)
    }
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    table = {"table": np.ones((2, 3), np.float32)}
    assert np.array_equal(shifted(table, np.random.default_rng(0))["table"], table["table"])


def test_the_search_trains_the_better_half_on(modules: Any, signature: Signature, data: Dataset) -> None:
    search, students = modules("search"), modules("students")
    few = make_dataset(data.rows(0, 90), data.labels[:90] if data.labels is not None else None)
    points = [search.Point(w, d, float(w * d), students.depthwise_cnn(signature, w, d)) for w in (4, 8) for d in (1, 2)]
    start = [point.artifact.digest for point in points]
    ranked = search.search(TEACHER, few, points, [1, 1, 1])
    assert [point.epochs for point in ranked] == [3, 2, 1, 1]
    assert sorted((point.width, point.depth) for point in ranked) == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert all(point.artifact.digest not in start for point in points)
    assert ranked[2].accuracy >= ranked[3].accuracy


def test_the_latency_table_has_every_point(modules: Any, signature: Signature, data: Dataset) -> None:
    search, students = modules("search"), modules("students")
    sizes = {(4, 1): students.depthwise_cnn(signature, 4, 1), (64, 4): students.depthwise_cnn(signature, 64, 4)}
    table = search.latency_table(sizes, data, budget_s=0.1)
    assert table.keys() == sizes.keys()
    assert min(table.values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds alone, but threads wait for each other on a busy machine
def test_a_depthwise_student_of_the_digits_model(modules: Any) -> None:
    distil, training = modules("distil"), modules("penstock.offline.compress.training.distill")
    options = training.DistillOptions(fit=training.FitOptions(epochs=60, learning_rate=5e-3))
    files = (DIGITS / "calibrate.npz", DIGITS / "evaluate.npz")
    learned, found = distil.run(DIGITS / "model.onnx", *files, "depthwise", options, (24, 2))
    assert found.accuracy.value > 0.7
    assert found.size_ratio > 20
    assert learned.provenance[-1].name == "distill"
