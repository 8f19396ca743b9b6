"""Streams run copies of the models, which are loaded once they are needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import Pipeline
from penstock.bundle import local, local_models
from penstock.bundle.local import DeviceLimits, LocalVariant, load_copies
from penstock.bundle.local_models import CopyPlan, plan_copies
from penstock.bundle.manifest import Variant
from penstock.bundle.pipeline import open_pipeline
from penstock.engines.onnxruntime import OnnxRuntimeModel
from penstock.errors import IntegrityError
from penstock.tensor import Array
from penstock.testing import FakeModel
from pipelines import FEATURES, scores_bundle

ITEMS = [np.array([n, 1 - n, n / 3], np.float32) for n in range(40)]


def one(tuned: int, threads: int, reentrant: bool = False, **options: Any) -> LocalVariant:
    given = {**options, "threads": tuned} if tuned else options
    return LocalVariant(
        FakeModel(reentrant=reentrant), Variant("a", "a.onnx", "onnxruntime", "fp32", given), 10, threads
    )


@pytest.mark.parametrize(
    ("loaded", "instances", "cores", "spare", "plan"),
    [
        (one(0, 4, reentrant=True), 1, 4, 100, CopyPlan(1, 1)),
        (one(0, 4), 1, 4, 100, CopyPlan(4, 1)),
        (one(0, 4), 1, 4, 20, CopyPlan(2, 2)),
        (one(0, 4), 1, 4, 19, CopyPlan(0, 4)),
        (one(0, 4, reentrant=True), 1, 4, -5, CopyPlan(0, 4)),
        (one(0, 1), 1, 1, 100, CopyPlan(0, 1)),
        (one(1, 1), 4, 4, 100, CopyPlan(3, 1)),
        (one(1, 1), 4, 2, 100, CopyPlan(1, 1)),
        (one(1, 1), 4, 4, 25, CopyPlan(2, 1)),
        (one(1, 1), 1, 4, 100, CopyPlan(0, 1)),
        (one(1, 1, reentrant=True), 4, 4, 100, CopyPlan(0, 1)),
        (one(2, 2, reentrant=True), 2, 4, 100, CopyPlan(1, 2)),
        (one(1, 4, reentrant=True), 4, 4, 100, CopyPlan(1, 1)),
        (one(0, 4, gpu=0), 1, 4, 100, CopyPlan(0, 4)),
        (one(0, 32), 1, 32, 900, CopyPlan(8, 4)),
        (one(1, 1), 32, 32, 900, CopyPlan(31, 1)),
    ],
    ids=[
        "shared", "untuned", "little memory", "too little memory", "no memory", "one core", "tuned", "fewer cores", "fewer copies",
        "short calls", "tuned and shared", "two threads", "threads given", "on a GPU", "many cores", "many cores and tuned",
    ],
)  # fmt: skip
def test_plans(loaded: LocalVariant, instances: int, cores: int, spare: int, plan: CopyPlan) -> None:
    assert plan_copies(loaded, instances, cores, spare) == plan


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 64), st.integers(-50, 900), st.booleans(), st.booleans())
@example(1, 2, 2, 900, False, False)
def test_no_plan_exceeds_the_cores_or_the_memory(
    tuned: int, instances: int, cores: int, spare: int, reentrant: bool, is_limited: bool
) -> None:
    loaded = one(tuned, cores if is_limited else min(tuned or cores, cores), reentrant)
    plan = plan_copies(loaded, instances, cores, spare)
    calls = plan.copies + (plan.copies > 0 and plan.threads == loaded.threads)
    assert calls * plan.threads <= cores
    assert plan.copies * loaded.memory_bytes <= max(0, spare)
    if not tuned and not reentrant and plan.copies:
        assert calls * plan.threads > cores // 2, "the cores are used"


def test_a_model_that_keeps_state_has_one_copy() -> None:
    loaded = one(0, 4)
    loaded.loaded.keeps_state = True
    assert plan_copies(loaded, 1, 4, 100).copies == 0


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline on a machine with four cores, with a model that is not reentrant."""
    monkeypatch.setattr(OnnxRuntimeModel, "reentrant", False)
    for module in (local, local_models):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    return scores_bundle(tmp_path)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each copy that is loaded."""
    found: list[int] = []

    def counted(bundle: Any, variant: Any, count: int, threads: int, limits: Any) -> Iterator[Any]:
        for copy in load_copies(bundle, variant, count, threads, limits):
            found.append(threads)
            yield copy

    monkeypatch.setattr(local_models, "load_copies", counted)
    return found


def test_the_first_stream_loads_the_copies(bundle: Path, loads: list[int]) -> None:
    with Pipeline.open(bundle) as scores:
        called = [scores(item) for item in ITEMS]
        scores.batch(ITEMS[:15])
        assert loads == []
        for _ in range(2):
            answers = scores.batch(ITEMS)
            assert [one["p"].tobytes() for one in answers] == [one["p"].tobytes() for one in called]
        scores.trace(ITEMS[:2])
        assert loads == [1, 1, 1, 1]
        assert scores._models.streamed()["linear"].calls == 4
        loaded = list(scores._models._copies)
    assert not any(copy._session for copy in loaded if isinstance(copy, OnnxRuntimeModel))


def test_limits_hold_for_the_copies(bundle: Path, loads: list[int]) -> None:
    with Pipeline.open(bundle) as scores:
        need = scores._models._loaded["linear"].memory_bytes
    for limits, threads in (
        (DeviceLimits(max_memory=2 * need), []),
        (DeviceLimits(max_memory=3 * need), [2, 2]),
        (DeviceLimits(threads=2), [1, 1]),
    ):
        loads.clear()
        with Pipeline(open_pipeline(bundle), limits) as scores:
            scores.batch(ITEMS)
        assert loads == threads


def test_each_copy_is_checked(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[FakeModel] = []

    def load(opened: Any, variant: Any, count: int, threads: int, limits: Any) -> Iterator[FakeModel]:
        right = next(load_copies(opened, variant, count, threads, limits))

        def wrong(inputs: Mapping[str, Array]) -> dict[str, Array]:
            return {name: array * np.float32(1.5) for name, array in right.forward(inputs).items()}

        for forward in (right.forward, right.forward, right.forward, wrong)[:count]:
            models.append(FakeModel(forward=forward))
            yield models[-1]

    monkeypatch.setattr(local_models, "load_copies", load)
    with Pipeline.open(bundle) as scores:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="step 'linear' is the first that differs"):
                scores.batch(ITEMS)
            assert len(models[-1].calls) == 1
            assert not any(model.loaded for model in models)
        assert scores(FEATURES)["label"]


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_bundle_that_is_gone_does_not_end_the_streams(
    bundle: Path, loads: list[int], change: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with Pipeline.open(bundle) as scores, caplog.at_level(logging.WARNING):
        bundle.unlink()
        if change == "replaced":
            scores_bundle(tmp_path, version="2")
        assert len(scores.batch(ITEMS)) == len(scores.batch(ITEMS)) == len(ITEMS)
    assert loads == []
    assert caplog.text.count("streams run the models of single calls") == 1
