from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import models
import networks
import penstock
from brief_builds import build
from penstock.artifact import Artifact
from penstock.bundle.manifest import encode
from penstock.bundle.open import open_bundle
from penstock.errors import (
    AlreadyExists,
    ContractUnmet,
    InvalidArgument,
    InvalidConfig,
    InvalidData,
    InvalidModel,
    NotFound,
)
from penstock.offline import build as build_module
from penstock.offline.build import BuildResult, Compression, Recipe
from penstock.offline.compress.planner.plan import CompressionPlan, PlanOptions
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.versions.versions import Version
from penstock.offline.judge.contract import Contract
from penstock.offline.model_store import SESSION, keep_models
from penstock.offline.tune.search import Trial
from penstock.tensor import Array
from penstock.testing import assert_tensors_close

QUICK = Recipe(engines=("onnxruntime",), threads=(1,), methods=(), careful=False, timing_s=0.2)
INT8 = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MIN_MAX, RangeMethod.MSE), timing_s=0.3)
AGREEMENT = msgspec.structs.replace(QUICK, contract=Contract(metric="agreement"))
RNG = np.random.default_rng


def network(batch: int | str = "N") -> bytes:
    """Convolution, batch normalisation, ReLU, pooling and a linear layer: x (N, 1, 8, 8) to y (N, 4)."""
    rng = RNG(0)
    weights = {
        "kernel": rng.standard_normal((16, 1, 3, 3)),
        "scale": rng.random(16) + 0.5,
        "shift": rng.standard_normal(16),
        "mean": rng.standard_normal(16),
        "variance": rng.random(16) + 0.5,
        "dense": rng.standard_normal((16, 4)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["b"]),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "dense"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def samples(count: int = 40, seed: int = 1) -> dict[str, Array]:
    return {"x": RNG(seed).standard_normal((count, 1, 8, 8)).astype(np.float32)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    path.write_bytes(network())
    np.savez(tmp_path / "data.npz", **samples())
    return path


@pytest.fixture(scope="module")
def int8_build(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    folder = tmp_path_factory.mktemp("build")
    (folder / "net.onnx").write_bytes(network())
    with pytest.MonkeyPatch.context() as patch:
        # INT8 is tried on every CPU, even if it is slower.
        patch.setattr(build_module, "make_look", lambda *_: lambda *_: {})
        return build(folder / "net.onnx", folder / "net.bundle", samples(), samples(seed=2), INT8)


def test_a_bundle_is_built_verified_and_answers_as_the_original(int8_build: BuildResult) -> None:
    bundle = open_bundle(int8_build.bundle)
    assert encode(bundle.manifest) == encode(int8_build.manifest)
    assert bundle.name == "net"
    assert int8_build.bundle_bytes == int8_build.bundle.stat().st_size
    with penstock.open(int8_build.bundle) as built, penstock.open(int8_build.bundle.with_name("net.onnx")) as original:
        got, want = built.infer(samples())["y"], original.infer(samples())["y"]
    assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)


def test_the_evidence_tells_what_was_done(int8_build: BuildResult) -> None:
    evidence = int8_build.evidence
    assert evidence.optimization["nodes_before"] == 6
    assert evidence.optimization["nodes_after"] < 6
    assert evidence.baseline.name.startswith("original-t")
    assert set(evidence.data) == {"calibrate", "evaluate"}
    kinds = {record.precision for record in evidence.candidates}
    assert kinds == {"fp32", "int8"}
    assert all(record.status == "outrun" or record.reason for record in evidence.candidates)
    assert any(note.startswith("INT8 on this CPU") for note in evidence.notes)
    assert int8_build.manifest.tools["penstock"] == penstock.__version__
    assert int8_build.chosen.status == "chosen"


def test_int8_is_chosen_only_with_proof(int8_build: BuildResult) -> None:
    chosen = int8_build.chosen
    if chosen.precision == "int8":
        assert chosen.speedup is not None
        assert chosen.speedup.low > 1
    for record in int8_build.evidence.candidates:
        assert record.accuracy is not None
        assert record.accuracy.metric == "fidelity"
        assert record.accuracy.samples == 40


def test_serving_is_what_was_measured(int8_build: BuildResult) -> None:
    manifest = int8_build.manifest
    assert manifest.serving.variant == manifest.variants[0].name == int8_build.chosen.name
    assert manifest.serving.max_batch in [point.batch for point in manifest.serving.latency]
    # The last variant runs on any machine: FP32, or INT8 with weights of 7 bits.
    assert manifest.variants[-1].engine == "onnxruntime"
    assert not manifest.variants[-1].requires


def test_without_calibration_int8_is_not_tried(model: Path, tmp_path: Path) -> None:
    result = build(model, tmp_path / "out.bundle", evaluate=tmp_path / "data.npz", recipe=QUICK)
    assert {record.precision for record in result.evidence.candidates} == {"fp32"}
    assert "there was no calibration data" in result.evidence.notes[0]


def test_without_evaluation_a_fifth_is_held_out(model: Path, tmp_path: Path) -> None:
    result = build(model, tmp_path / "out.bundle", calibrate=tmp_path / "data.npz", recipe=QUICK)
    assert result.evidence.baseline.accuracy is not None
    assert result.evidence.baseline.accuracy.samples == 8
    assert "no calibration method was requested" in result.evidence.notes[0]


def test_the_same_samples_for_both_are_noted(model: Path, tmp_path: Path) -> None:
    result = build(model, tmp_path / "out.bundle", samples(), samples(), QUICK)
    assert any(
        "40 of 40 evaluation rows are also calibration or training rows (rows 0, 1, " in note
        for note in result.evidence.notes
    )


def test_labels_that_were_only_trusted_are_noted(model: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(QUICK, contract=Contract(trust_labels=True))
    data = {**samples(), "labels": np.ones(40, int)}
    result = build(model, tmp_path / "out.bundle", evaluate=data, recipe=recipe)
    assert result.evidence.metric == "top-1"
    assert any("the labels were accepted as they are" in note for note in result.evidence.notes)


@pytest.mark.parametrize("metric", ["fidelity", "cosine"])
def test_a_contract_without_a_limit_is_written_and_read(model: Path, tmp_path: Path, metric: str) -> None:
    contract = Contract(1.0, metric=metric, max_output_error=float("inf"))
    recipe = msgspec.structs.replace(QUICK, contract=contract)
    result = build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=recipe)
    manifest = open_bundle(result.bundle).manifest
    assert encode(manifest) == encode(result.manifest)
    evidence = manifest.evidence
    assert evidence is not None
    assert evidence.max_output_error is None
    assert "difference from the original" not in evidence.contract
    assert ("any loss of fidelity" in evidence.contract) is (metric == "fidelity")


def test_the_original_with_answers_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("Log", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy"]
    graph = helper.make_graph([node], "log", values[:1], values[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.ones((9, 2), np.float32)
    x[4, 1] = -1
    with pytest.raises(
        InvalidData, match="the original's output 'y' is NaN or infinite in 1 of 9 samples, first in sample 4"
    ):
        build(Artifact.from_bytes(proto.SerializeToString()), tmp_path / "o.bundle", evaluate={"x": x}, recipe=QUICK)


def test_a_model_without_anything_to_quantise_is_built_in_fp32(tmp_path: Path) -> None:
    data = {"x": np.ones((4, 2), np.float32)}
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MSE,), timing_s=0.1)
    result = build(models.input_as_output(), tmp_path / "out.bundle", data, data, recipe)
    assert any(note.startswith("INT8 was not tried: ") for note in result.evidence.notes)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_model_of_fixed_batch(tmp_path: Path, batch: int) -> None:
    artifact = Artifact.from_bytes(network(batch))
    recipe = Recipe(
        engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MSE,), objective="throughput", timing_s=0.1
    )
    result = build(artifact, tmp_path / "out.bundle", calibrate=samples(20), recipe=recipe)
    assert result.manifest.serving.max_batch == 1
    assert result.evidence.rows_per_call == batch
    with penstock.open(result.bundle) as built:
        assert built.infer_rows(samples(8))["y"].shape == (8, 4)


def test_throughput_is_timed_in_batches(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), methods=(), objective="throughput", timing_s=0.1)
    assert build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=recipe).evidence.rows_per_call == 16


def test_a_name_and_a_folder_may_be_asked_for(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(name="digits", folder=True, engines=("onnxruntime",), threads=(1,), methods=(), timing_s=0.1)
    result = build(model, tmp_path / "out", evaluate=samples(), recipe=recipe)
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert open_bundle(result.bundle).name == "digits"
    assert result.bundle_bytes == sum(file.stat().st_size for file in result.bundle.rglob("*") if file.is_file())


def test_a_second_build_replaces_the_bundle(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.bundle"
    build(model, target, evaluate=samples(), recipe=QUICK)
    before = target.read_bytes()
    build(model, target, evaluate=samples(seed=3), recipe=QUICK)
    assert target.read_bytes() != before
    assert open_bundle(target).name == "out"


def test_what_is_not_a_bundle_is_not_written_over(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    # An npz is a zip archive, as a bundle is.
    for target in (tmp_path / "notes.txt", tmp_path / "data.npz", tmp_path / "folder", model):
        with pytest.raises(AlreadyExists) as raised:
            build(model, target, evaluate=samples(), recipe=QUICK)
        assert target.name in raised.value.message
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert np.load(tmp_path / "data.npz")["x"].shape == (40, 1, 8, 8)


def test_force_writes_over_a_file_but_never_over_a_folder(model: Path, tmp_path: Path) -> None:
    force = Recipe(overwrite=True, engines=("onnxruntime",), threads=(1,), methods=(), timing_s=0.1)
    (tmp_path / "notes.txt").write_text("old")
    build(model, tmp_path / "notes.txt", evaluate=samples(), recipe=force)
    assert open_bundle(tmp_path / "notes.txt").name == "notes"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    with pytest.raises(AlreadyExists, match="is not a bundle"):
        build(model, tmp_path / "folder", evaluate=samples(), recipe=force)


def test_bad_models_are_refused_before_any_work(tmp_path: Path) -> None:
    target = tmp_path / "out.bundle"
    whole = network()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name in ("cut.onnx", "text.onnx", "empty.onnx"):
        with pytest.raises(InvalidModel) as raised:
            build(tmp_path / name, target, evaluate=samples(), recipe=QUICK)
        assert raised.value.hint
    with pytest.raises(NotFound, match=r"none\.onnx"):
        build(tmp_path / "none.onnx", target, evaluate=samples(), recipe=QUICK)
    constant = models.artifact(
        [("Identity", ["w"], ["y"])], [], [("y", TensorProto.FLOAT, [1])], {"w": np.ones(1, "f")}
    )
    with pytest.raises(InvalidModel, match="has no inputs"):
        build(constant, target, evaluate={}, recipe=QUICK)
    assert not target.exists()


def test_bad_data_is_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    def refuse(cause: str, calibrate: object = None, evaluate: object = None) -> None:
        with pytest.raises(InvalidData, match=cause):
            build(model, tmp_path / "out.bundle", calibrate, evaluate, QUICK, lambda stage, *_: stages.append(stage))

    refuse("no data to judge accuracy on")
    refuse("no array for input", evaluate={"image": samples()["x"]})
    refuse("contains NaN", evaluate={"x": np.full_like(samples()["x"], np.nan)})
    refuse("is FP32, but the data is float64", calibrate={"x": samples()["x"].astype(float)}, evaluate=samples())
    refuse("no output suits the labels", evaluate={**samples(), "labels": np.ones(40)})
    refuse("differ in number of samples", evaluate={**samples(), "labels": np.ones(39, int)})
    refuse("all 40 labels are the same", evaluate={**samples(), "labels": np.ones(40, int)})
    refuse("no better than chance", evaluate={**samples(200), "labels": RNG(0).integers(0, 4, 200)})
    refuse("cannot be split", calibrate=samples(1))
    refuse("cannot read", evaluate=model)
    assert set(stages) == {"read"}


def test_bad_recipes_are_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="unknown engine 'tensorrt'"):
        build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=Recipe(engines=("tensorrt",)))
    with pytest.raises(InvalidArgument, match="engine 'tflite' does not run ONNX models"):
        build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=Recipe(engines=("tflite",)))
    with pytest.raises(InvalidConfig, match="must be from 1 to .* got 0"):
        build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=Recipe(threads=(0,)))


def test_a_contract_that_nothing_meets_leaves_nothing(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(contract=Contract(p99_ms=1e-6), engines=("onnxruntime",), threads=(1,), methods=(), timing_s=0.1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ContractUnmet, match="latency: ") as raised:
        build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=recipe)
    assert "--p99" in raised.value.hint
    assert {candidate["name"] for candidate in raised.value.candidates} == {"original-t1", "onnxruntime-fp32-t1"}
    assert sorted(tmp_path.iterdir()) == before


def test_external_weights_are_in_the_bundle_whoever_wins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto = onnx.load(model)
    outside = tmp_path / "outside"
    outside.mkdir()
    onnx.save(proto, outside / "net.onnx", save_as_external_data=True, location="net.weights", size_threshold=0)
    assert (outside / "net.weights").stat().st_size > 0
    result = build(outside / "net.onnx", tmp_path / "out.bundle", evaluate=samples(), recipe=QUICK)
    assert result.evidence.baseline.size_bytes > (outside / "net.weights").stat().st_size
    (outside / "net.weights").unlink()
    monkeypatch.chdir(outside)
    with penstock.open(model) as original, penstock.open(tmp_path / "out.bundle") as built:
        assert_tensors_close(built.infer(samples()), original.infer(samples()), atol=1e-4)


@pytest.mark.parametrize("name", [".", "..", "a/.."])
def test_a_target_without_a_name_is_refused_before_the_work(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(InvalidArgument, match="is not the name of a file"):
        build(model, name, evaluate=samples(), recipe=QUICK)


def test_a_target_below_a_file_is_refused_before_the_work(model: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: Not a directory"):
        build(model, model / "out.bundle", evaluate=samples(), recipe=QUICK)


def test_a_name_too_long_is_refused_before_the_work(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: File name too long"):
        build(model, tmp_path / ("x" * 300), evaluate=samples(), recipe=QUICK)


@pytest.mark.parametrize(
    ("target", "name"), [("out.bundle", "a/b"), ("out.bundle", "m\udcff"), (".out.bundle", "")], ids=ascii
)
def test_a_name_that_no_server_accepts_is_refused_before_the_work(
    target: str, name: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid model name"):
        build(model, tmp_path / target, evaluate=samples(), recipe=msgspec.structs.replace(QUICK, name=name))
    assert not list(tmp_path.glob("*out*"))


def test_more_threads_than_cores_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="from 1 to .* cores of this machine"):
        build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=Recipe(threads=(99999999999999999999,)))


def test_data_that_the_model_fails_on_are_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    table = numpy_helper.from_array(np.ones((10, 4), np.float32), "table")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    graph = helper.make_graph(nodes, "lookup", [ids], [y], [table])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(InvalidData, match="on samples of the data"):
        build(
            Artifact.from_bytes(proto.SerializeToString()),
            tmp_path / "out.bundle",
            evaluate={"ids": np.array([1, 500])},
            recipe=QUICK,
        )


def test_what_the_chosen_figures_hide_is_noted(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(engines=("onnxruntime",), threads=(1, 2), methods=(), timing_s=0.2)
    result = build(model, tmp_path / "out.bundle", evaluate=samples(), recipe=recipe)
    compared = [note for note in result.evidence.notes if "the original at 2 threads" in note]
    assert len(compared) == (result.chosen.threads == 1)
    assert result.chosen.calls > 0
    assert result.evidence.optimized is not None


def test_a_choice_that_ends_merging_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer(_: object, trials: Sequence[Trial], *__: object) -> Trial:
        return next(trial for trial in trials if trial.candidate.calibration == wanted)

    monkeypatch.setattr("penstock.offline.tune.tuner.choose", prefer)
    monkeypatch.setattr("penstock.offline.tune.tuner.finalists", lambda trials, *_: trials)
    monkeypatch.setattr(build_module, "make_look", lambda *_: lambda *_: {})
    data = {"x": RNG(3).standard_normal((40, 16)).astype(np.float32)}
    recipe = msgspec.structs.replace(QUICK, methods=(RangeMethod.MSE,))
    for wanted, is_merged in (("mse-linear-per-tensor", True), ("dynamic", False)):
        result = build(networks.mlp(256), tmp_path / "out.bundle", data, data, recipe)
        assert result.chosen.calibration == wanted
        assert (result.manifest.serving.max_batch > 1) <= is_merged
        assert any("does not merge requests" in note for note in result.evidence.notes) != is_merged
    for changes in ({"dynamic": False}, {"objective": "throughput"}, {"objective": "size"}):
        wanted = "mse-linear"
        result = build(
            networks.mlp(256), tmp_path / "out.bundle", data, data, msgspec.structs.replace(recipe, **changes)
        )
        assert "dynamic" not in {record.calibration for record in result.evidence.candidates}


COMMAND = ["build", "net.onnx", "--evaluate", "data.npz", "--method", "none", "--engine", "onnxruntime"]
COMMAND += ["--threads", "1", "--budget", "100ms", "-o", "net.bundle"]

# The command itself, with the disk or the process taken away at the moment that a test names.
RUN = "import sys; sys.argv[1:] = {command}; from penstock.cli.main import run; {accident}; run()"
KILL_WHILE_TUNING = (
    "import os; from penstock.offline.tune import tuner; tuner.finalists = lambda *_: os.kill(os.getpid(), 9)"
)
KILL_BEFORE_RENAME = "import os; os.fsync = lambda file: os.kill(os.getpid(), 9)"
FULL_DISK = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"


def penstock_build(folder: Path, accident: str = "pass") -> subprocess.CompletedProcess[str]:
    code = RUN.format(command=COMMAND, accident=accident)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("accident", [KILL_WHILE_TUNING, KILL_BEFORE_RENAME], ids=["tuning", "packing"])
def test_a_killed_build_leaves_what_was_there_and_the_next_one_works(model: Path, accident: str) -> None:
    folder, target = model.parent, model.parent / "net.bundle"
    build(model, target, evaluate=samples(), recipe=QUICK)
    before = target.read_bytes()
    assert penstock_build(folder, accident).returncode == -signal.SIGKILL
    assert target.read_bytes() == before
    build(model, target, evaluate=samples(seed=3), recipe=QUICK)
    assert open_bundle(target).name == "net"
    there = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob("net.bundle.*.partial")}
    assert there == {"data.npz", "net.bundle", "net.onnx"}


def test_a_full_disk_leaves_no_half_bundle(model: Path) -> None:
    done = penstock_build(model.parent, FULL_DISK)
    assert done.returncode == 7
    assert "error: cannot write 'net.bundle': File too large" in done.stderr
    assert "fix: free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in model.parent.iterdir()) == ["data.npz", "net.onnx"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_leave_to_write(model: Path) -> None:
    model.parent.chmod(0o500)
    done = penstock_build(model.parent)
    model.parent.chmod(0o700)
    assert done.returncode == 7
    assert "Permission denied" in done.stderr


def test_few_samples_are_warned_of_before_the_work(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = build(model, tmp_path / "out.bundle", evaluate=tmp_path / "data.npz", recipe=AGREEMENT)
    note = "40 evaluation samples cannot prove a loss within 1.00%, so losses are estimates: give at least 299"
    assert any(note in one for one in result.evidence.notes)
    assert note in caplog.text


def test_the_judged_output_of_several_is_told_before_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = RNG(0).standard_normal((40, 3)).astype(np.float32)
    data = {"x": x, "labels": (x @ models.linear_weight()).argmax(axis=1)}
    result = build(models.two_linear(), tmp_path / "out.bundle", evaluate=data, recipe=QUICK)
    note = "judging output 'y' by top-1: there are labels, [40] of type int64, and 'y' is the first output that suits"
    assert caplog.messages[0].startswith(note)
    assert any(one.startswith(note) for one in result.evidence.notes)
    named = msgspec.structs.replace(QUICK, contract=Contract(output="y"))
    result = build(models.two_linear(), tmp_path / "out.bundle", evaluate=data, recipe=named)
    assert not any("judging" in one for one in result.evidence.notes)


def test_calibration_data_unlike_the_evaluation_data_are_noted(model: Path, tmp_path: Path) -> None:
    with np.load(tmp_path / "data.npz") as arrays:
        x = arrays["x"]
    result = build(model, tmp_path / "out.bundle", {"x": x * 0.1}, {"x": x + 2}, QUICK)
    assert any(
        "the calibration data differ from the evaluation data: tensor 'x'" in one for one in result.evidence.notes
    )


@pytest.mark.parametrize("wrong", [Compression(budget_s=0), Compression(epochs=0), Compression(seed=-1)])
def test_a_plan_that_makes_no_sense_is_refused_before_the_work(model: Path, tmp_path: Path, wrong: Compression) -> None:
    stages: list[str] = []
    recipe = msgspec.structs.replace(QUICK, compression=wrong)
    with pytest.raises(InvalidConfig, match="a plan cannot have"):
        build(model, tmp_path / "o.bundle", tmp_path / "data.npz", None, recipe, lambda stage, *_: stages.append(stage))
    assert stages == []


def test_a_plan_without_data_is_refused(model: Path, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(QUICK, compression=Compression(budget_s=1))
    with pytest.raises(InvalidData, match="compressing the model requires data"):
        build(model, tmp_path / "out.bundle", evaluate=tmp_path / "data.npz", recipe=recipe)


def test_copies_of_rows_prove_nothing(tmp_path: Path) -> None:
    x = RNG(0).standard_normal((40, 3)).astype(np.float32)
    data = {"x": x[[*range(40), 3, 7]], "labels": (x @ models.linear_weight()).argmax(axis=1)[[*range(40), 3, 7]]}
    contract = Contract(prove_accuracy=True)
    recipe = msgspec.structs.replace(QUICK, contract=contract)
    with pytest.raises(InvalidData, match=r"2 of 42 evaluation rows are copies.*only 40 distinct rows") as error:
        build(models.linear(), tmp_path / "o.bundle", evaluate=data, recipe=recipe)
    assert "remove the copies" in (error.value.hint or "")
    relabelled = {**data, "labels": np.append(data["labels"][:40], 1 - data["labels"][40:])}
    build(models.linear(), tmp_path / "o.bundle", evaluate=relabelled, recipe=recipe)
    agreement = msgspec.structs.replace(recipe, contract=Contract(prove_accuracy=True, metric="agreement"))
    with pytest.raises(InvalidData, match="2 of 42 evaluation rows are copies"):  # no label is used
        build(models.linear(), tmp_path / "o.bundle", evaluate=relabelled, recipe=agreement)


def test_the_cut_between_two_classes_is_decided_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan judges on other rows, on which all logits may be from 0 to 1; the bundle says where the cut is."""
    cuts: list[float | None] = []

    def planned(model: Artifact, data: object, options: PlanOptions, **_: object) -> CompressionPlan:
        cuts.append(options.contract.cut)
        return CompressionPlan((), ())

    monkeypatch.setattr("penstock.offline.build.plan", planned)
    logits = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    few, all_rows = (
        {"x": y / models.linear_weight(1, 1), "labels": (y[:, 0] > 0) * 1} for y in (logits[20:30], logits)
    )
    recipe = msgspec.structs.replace(QUICK, compression=Compression(budget_s=1))
    result = build(models.linear(1, 1), tmp_path / "out.bundle", few, all_rows, recipe)
    assert cuts == [0.0]
    assert result.evidence.metric_cut == 0.0
    assert result.evidence.baseline.accuracy is not None
    assert result.evidence.baseline.accuracy.value == 1
    opened = open_bundle(result.bundle).manifest.evidence
    assert opened is not None
    assert opened.metric_cut == 0.0


def test_a_plan_whose_models_all_fail_is_noted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best permitted candidate is served, and a note explains why it is not a model of the plan."""
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        if tensor.name == "dense":
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), "dense"))
    wrong = Artifact.from_bytes(proto.SerializeToString())

    def planned(*_: object, **__: object) -> CompressionPlan:
        return CompressionPlan((Version(wrong, compression="prune"),), ())

    monkeypatch.setattr("penstock.offline.build.plan", planned)
    recipe = msgspec.structs.replace(QUICK, compression=Compression(budget_s=1))
    result = build(model, tmp_path / "out.bundle", tmp_path / "data.npz", tmp_path / "data.npz", recipe)
    assert result.chosen.compression == ""
    assert any(
        "the plan kept 1 model(s), but all failed the contract on the evaluation data" in n
        for n in result.evidence.notes
    )


def test_what_is_to_be_small_needs_no_second_model(model: Path, tmp_path: Path) -> None:
    """Engines and precisions that need a fallback model are not tried, even if they are installed."""
    recipe = Recipe(threads=(1,), methods=(RangeMethod.MSE,), careful=False, timing_s=0.2, objective="size")
    result = build(model, tmp_path / "out.bundle", tmp_path / "data.npz", tmp_path / "data.npz", recipe)
    assert {(one.engine, one.precision) for one in result.evidence.candidates} == {
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
    }
    assert len(result.manifest.variants) == 1
    (stored,) = [entry.size_bytes for entry in result.manifest.files]
    assert stored == result.chosen.stored_bytes < model.stat().st_size


def test_within_a_build_models_are_read_and_loaded_once(tmp_path: Path) -> None:
    digits = Path(__file__).parents[2] / "examples" / "digits"
    recipe = Recipe(engines=("onnxruntime",), timing_s=0.2)
    with keep_models(8 << 30) as store:
        build(digits / "model.onnx", tmp_path / "b.bundle", digits / "calibrate.npz", digits / "evaluate.npz", recipe)
    # The check of each of the ten INT8 models parses it, and loads it as written, without corrections and without rounding.
    assert store.made["parse"] <= 13 + 10
    # Timing loads models in processes of its own.
    assert store.made[SESSION] <= 39 + 4 * 10
