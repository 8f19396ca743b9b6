import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

import bundles
import models
from penstock.bundle.manifest import ServingConfig, Variant
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    InvalidConfig,
    InvalidModel,
    NotFound,
    PenstockError,
    ResourceExhausted,
)
from penstock.online.instances.process_instance import ProcessModel
from penstock.online.repository import resolved_version as sources
from penstock.online.repository.loading.loader import load
from penstock.online.repository.loading.warm_up import warm_up
from penstock.online.repository.resolved_version import LoadOptions, ResolvedVersion, define, find
from penstock.online.scheduler.base import InstanceDied
from penstock.resources import MachineFacts, machine_facts
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import DOUBLER, FakeModel


def find_sources(targets: list[Path], load_options: LoadOptions | None = None) -> list[ResolvedVersion]:
    return [
        find(model, version, load_options or LoadOptions()) for model in define(targets) for version in model.versions
    ]


def write(folder: Path, name: str = "linear", data: bytes | None = None) -> Path:
    path = folder / f"{name}.onnx"
    path.write_bytes(models.linear().data if data is None else data)
    return path


def test_a_plain_model_is_served_under_its_stem_and_batched_where_its_first_axis_is_free(tmp_path: Path) -> None:
    (resolved,) = find_sources([write(tmp_path)])
    loaded = load(resolved)
    assert (resolved.name, resolved.engine, resolved.platform) == ("linear", "onnxruntime", "onnxruntime_onnx")
    assert loaded.config.max_batch_size == 64
    fixed = write(tmp_path, "fixed", models.fixed_batch().data)
    assert load(find_sources([fixed])[0]).config.max_batch_size == 0


def test_a_bundle_is_served_as_it_says_unless_told_otherwise(tmp_path: Path) -> None:
    files = {"model.onnx": models.linear().data}
    target = bundles.packed(tmp_path / "test.bundle", files)
    (resolved,) = find_sources([target])
    assert (resolved.name, resolved.max_batch, resolved.instances) == ("test", 8, 1)
    assert load(resolved).models[0].signature.input_names == ["x"]
    (resolved,) = find_sources([target], LoadOptions(max_batch=2, instances=3))
    loaded = load(resolved)
    assert loaded.config.max_batch_size == 2
    assert len(loaded.models) == 3
    assert len(set(map(id, loaded.models))) == 1, "a reentrant model of one thread is shared"


def with_serving(target: Path, threads: int, instances: int, machine: MachineFacts) -> Path:
    return bundles.packed(
        target,
        {"model.onnx": models.linear().data},
        variants=(Variant("fp32", "model.onnx", "onnxruntime", "fp32", options={"threads": threads}),),
        serving=ServingConfig("fp32", threads, instances, max_batch=8),
        machine=machine,
    )


@pytest.mark.parametrize(
    ("tuned", "asked", "served"),
    [
        ((16, 1), None, (4, 1)),
        ((4, 16), None, (1, 4)),
        ((2, 2), None, (2, 2)),
        ((4, 1), 3, (1, 3)),
        ((0, 2), None, (2, 2)),
    ],
)
def test_a_bundle_takes_no_more_cores_than_there_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuned: tuple[int, int],
    asked: int | None,
    served: tuple[int, int],
) -> None:
    here = msgspec.structs.replace(machine_facts(), cores=4)
    monkeypatch.setattr(sources, "machine_facts", lambda: here)
    monkeypatch.setattr(sources, "core_ids", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(sources, "cpu_quota", lambda: None)
    (resolved,) = find_sources([with_serving(tmp_path / "test.bundle", *tuned, here)], LoadOptions(instances=asked))
    assert (resolved.options["threads"], resolved.instances) == served


def test_a_bundle_tuned_elsewhere_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    find_sources([with_serving(tmp_path / "here.bundle", 1, 1, machine_facts())])
    assert not caplog.records
    find_sources([with_serving(tmp_path / "elsewhere.bundle", 1, 1, bundles.MACHINE)])
    assert "tuned on another machine" in caplog.text
    assert "CPU: measured on Test CPU, here" in caplog.text


def test_a_model_with_several_threads_is_not_shared(tmp_path: Path) -> None:
    (resolved,) = find_sources([write(tmp_path)], LoadOptions(instances=2))
    for threads, copies in ((1, 1), (2, 2)):
        loaded = load(msgspec.structs.replace(resolved, options={"threads": threads}))
        assert len(set(map(id, loaded.models))) == copies


def test_models_in_processes_of_their_own(tmp_path: Path) -> None:
    (resolved,) = find_sources([write(tmp_path)], LoadOptions(4, instances=2, isolation="process", model_timeout_s=60))
    assert resolved.has_own_threads
    loaded = load(resolved)
    try:
        assert loaded.config.max_batch_size == 4
        assert all(isinstance(model, ProcessModel) for model in loaded.models)
        assert len({model.pid for model in loaded.models}) == 2
        x = np.ones((2, 3), np.float32)
        for model, cores in zip(loaded.models, resolved.cores, strict=True):
            np.testing.assert_allclose(model.forward({"x": x})["y"], x @ models.linear_weight(), rtol=1e-6)
            assert os.sched_getaffinity(model.pid) == set(cores)
    finally:
        for model in loaded.models:
            model.unload()


def test_a_model_in_a_process_that_is_refused_leaves_none(tmp_path: Path) -> None:
    (resolved,) = find_sources([write(tmp_path, "corrupt", b"not a model")], LoadOptions(isolation="process"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidModel, match="refuses the model"):
        load(resolved)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("target", ["", "m"], ids=["repository", "model"])
def test_a_repository_given_as_a_target_is_told_where_it_belongs(tmp_path: Path, target: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    write(tmp_path / "m" / "1", "model")
    with pytest.raises(InvalidArgument, match="version folders") as refusal:
        define([tmp_path / target])
    assert refusal.value.hint == f"serve the repository with --model-repository {tmp_path}"


def test_settings_of_a_model_that_is_no_target_say_where_those_of_a_repository_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="for model 'm', but no such model was passed") as refusal:
        define([], {"m": {"max_batch_size": 4}})
    assert "config.pbtxt" in refusal.value.hint
    with pytest.raises(InvalidConfig, match="model 'liner'") as refusal:
        define([write(tmp_path)], {"liner": {"max_batch_size": 4}})
    assert refusal.value.hint == "did you mean 'linear'?"


def test_targets_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no model or bundle '.*absent.onnx'"):
        find_sources([tmp_path / "absent.onnx"])
    (tmp_path / "other").mkdir()
    with pytest.raises(AlreadyExists, match="two targets are called 'linear'"):
        find_sources([write(tmp_path), write(tmp_path / "other")])
    with pytest.raises(InvalidModel, match="model 'corrupt': ONNX Runtime refuses the model"):
        load(find_sources([write(tmp_path, "corrupt", b"not a model")])[0])
    with pytest.raises(ResourceExhausted, match="'linear' cannot be warmed up with batches of 35184372088832 rows"):
        load(find_sources([write(tmp_path)], LoadOptions(max_batch=2**45))[0])
    broken = tmp_path / "broken.bundle"
    broken.write_bytes(b"not a bundle")
    with pytest.raises(IntegrityError):
        find_sources([broken])


def test_warm_up_runs_one_row_and_the_largest_batch() -> None:
    model = FakeModel()
    assert warm_up(model, 8)
    assert [call["x"].shape for call in model.calls[:2]] == [(1, 2), (8, 2)]


def test_a_model_that_does_not_answer_row_for_row_is_not_batched() -> None:
    def summary(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": inputs["x"].sum(axis=0, keepdims=True)}

    assert not warm_up(FakeModel(forward=summary), 8)


def failing(inputs: Mapping[str, Array]) -> dict[str, Array]:
    raise PenstockError("the model failed")


@pytest.mark.parametrize("shape", [(-1, -1), (-1, 2)])
def test_a_model_may_refuse_guessed_inputs(shape: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    guessed = Signature((TensorSpec("x", DataType.FP32, shape),), DOUBLER.outputs)
    assert warm_up(FakeModel(guessed, failing), 8, "m")
    (record,) = caplog.records
    assert record.getMessage() == (
        "model 'm' is served without warm-up: it rejects a guessed batch of 1 zero rows: the model failed "
        "(describe a valid request in 'model_warmup')"
    )


def test_a_run_with_guessed_inputs_that_never_ends_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    model = OnnxRuntimeEngine().load(models.endless_on_zeros(), {"threads": 1})
    assert warm_up(model, 8, "m", limit_s=0.2)
    (record,) = caplog.records
    assert (
        "a guessed batch of 1 zero rows: the run was ended after 0.2 s (describe a valid request" in record.getMessage()
    )
    ones = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(model.forward({"x": ones})["y"], ones)


def test_a_model_whose_process_ends_while_it_is_warmed_up_is_refused() -> None:
    def ends(inputs: Mapping[str, Array]) -> dict[str, Array]:
        raise InstanceDied("its process has ended")

    with pytest.raises(InstanceDied):
        warm_up(FakeModel(DOUBLER, ends), 8)


def test_a_model_that_keeps_state_is_not_called(caplog: pytest.LogCaptureFixture) -> None:
    model = FakeModel()
    model.keeps_state = True
    assert warm_up(model, 8)
    assert not model.calls
    assert not caplog.records


def test_text_inputs_are_warmed_up_with_empty_text() -> None:
    text = Signature((TensorSpec("x", DataType.BYTES, (-1,)),), (TensorSpec("y", DataType.BYTES, (-1,)),))
    model = FakeModel(text, lambda inputs: {"y": inputs["x"]})
    assert warm_up(model, 2)
    np.testing.assert_array_equal(model.calls[1]["x"], np.array([b"", b""], object))


def test_a_model_whose_files_do_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (resolved,) = find_sources([write(tmp_path)])
    with pytest.raises(ResourceExhausted, match=r"^model 'linear': its files take 0\.00 GiB .* may use only 0\.00 GiB"):
        load(resolved, usable_bytes=16)


def test_an_estimate_over_the_limit_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (resolved,) = find_sources([write(tmp_path)])
    load(resolved, usable_bytes=1 << 20).drop()
    assert "may need up to" in caplog.text
    caplog.clear()
    load(resolved, usable_bytes=1 << 30).drop()
    assert not caplog.text
