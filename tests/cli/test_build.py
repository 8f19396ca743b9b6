from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.artifact import Artifact
from penstock.bundle.evidence import CandidateRecord
from penstock.bundle.open import open_bundle
from penstock.cli.build import summary
from penstock.offline.build import Recipe, build

QUICK = ("--engine", "onnxruntime", "--threads", "1", "--method", "min-max", "--budget", "10s")
DATA = ("--calibrate", "data.npz", "--evaluate", "data.npz")


@pytest.fixture(autouse=True)
def int8_is_tried_even_if_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.offline.build.make_look", lambda *_: lambda *_: {})


def test_json_is_what_scripts_rely_on(penstock, folder: Path) -> None:
    done = penstock("build", "linear.onnx", *DATA, *QUICK, "-o", "out.bundle", "--json")
    assert done.code == 0
    assert len(done.out.splitlines()) == 1
    found = done.json
    assert found["bundle"] == "out.bundle"
    assert found["chosen"].keys() >= {"engine", "precision", "threads", "batch"}
    assert found["baseline"].keys() >= {"latency_ms", "accuracy"}
    assert found["built"].keys() >= {"latency_ms", "accuracy", "size_bytes"}
    assert isinstance(found["speedup"], float)
    assert isinstance(found["accuracy_loss"], float)
    assert {one["precision"] for one in found["candidates"]} == {"fp32", "int8"}
    for one in found["candidates"]:
        assert one["status"] in ("chosen", "outrun", "rejected", "failed")
        assert one["reason"]
        assert msgspec.convert(one, CandidateRecord).name == one["name"]
    assert found["baseline"]["accuracy"] == 1.0
    assert found["metric"] == "top-1"
    assert open_bundle(folder / "out.bundle").manifest.serving.variant == found["chosen"]["name"]


def test_the_summary_is_json_whatever_failed(folder: Path) -> None:
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), methods=(), timing_s=0.1)
    with np.load("data.npz") as data:
        inputs = {"x": data["x"]}
    result = build(Artifact.from_file("linear.onnx"), "out.bundle", evaluate=inputs, recipe=recipe)
    failed = msgspec.structs.replace(
        result.evidence,
        candidates=(CandidateRecord("broken", "openvino", "int8", 1, "failed", "cannot load"),),
        chosen="original-t1",
    )
    manifest = msgspec.structs.replace(result.manifest, evidence=failed)
    found = json.loads(msgspec.json.encode(summary(msgspec.structs.replace(result, manifest=manifest))))
    assert found["chosen"]["name"] == "original-t1"
    assert (found["speedup"], found["accuracy_loss"]) == (1.0, 0.0)
    assert found["candidates"][0]["latency_ms"] is None


def test_a_person_reads_a_table_and_gets_a_report(penstock, folder: Path) -> None:
    done = penstock("build", "linear.onnx", *DATA, *QUICK, "-o", "out.bundle", "--report", "report.html")
    assert done.code == 0
    assert "x FP32[N, 3] → y FP32[N, 2]" in done.out
    assert "original" in done.out
    assert "bundle  out.bundle\nreport  report.html" in done.out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "optimize  " not in done.out  # progress is on stderr


def test_options_reach_the_recipe(penstock, folder: Path) -> None:
    options = (
        "--name",
        "renamed",
        "--folder",
        "--max-accuracy-loss",
        "2%",
        "--p99",
        "10s",
        "--objective",
        "throughput",
    )
    done = penstock("build", "linear.onnx", *DATA, *QUICK, *options, "--method", "mse", "-o", "out", "--json")
    assert done.code == 0
    manifest = open_bundle(folder / "out").manifest
    assert (folder / "out").is_dir()
    assert manifest.name == "renamed"
    assert manifest.serving.p99_ms == 10_000
    assert manifest.evidence is not None
    assert (manifest.evidence.max_accuracy_loss, manifest.evidence.rows_per_call) == (0.02, 16)


def test_the_metric_is_in_the_bundle_and_told_with_its_reason(penstock, folder: Path) -> None:
    (folder / "own_metric_of_build.py").write_text("def score(output, labels):\n    return (output > 0).mean(axis=1)\n")
    for options, metric in (((), "fidelity"), (("--metric", "own_metric_of_build:score"), "own_metric_of_build:score")):
        np.savez(folder / "plain.npz", x=np.load(folder / "data.npz")["x"])
        data = ("--evaluate", "plain.npz", "--max-output-error", "20%", "--metric-output", "y")
        done = penstock("build", "linear.onnx", *data, *QUICK, *options, "-o", "out.bundle")
        assert done.code == 0
        evidence = open_bundle(folder / "out.bundle").manifest.evidence
        assert evidence is not None
        assert (evidence.metric, evidence.metric_outputs, evidence.max_output_error) == (metric, ("y",), 0.2)
        assert f"loss of {metric} in 'y' ({evidence.metric_reason}" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("options", "code", "cause"),
    [
        (("--max-accuracy-loss", "5"), 2, "must be below 1"),
        (("--p99", "soon"), 2, "'soon' is not a time"),
        (("--p99", "0ms"), 2, "must be a positive time"),
        (("--threads", "0"), 2, "is not a list of whole numbers"),
        (("--method", "magic"), 2, "unknown calibration method 'magic'"),
        (("--engine", "magic"), 2, "unknown engine 'magic'"),
        (("--evaluate", "none.npz"), 3, "no data file 'none.npz'"),
        (("--evaluate", "linear.onnx"), 2, "cannot read 'linear.onnx'"),
        (("--metric", "accuracy"), 2, "there is no metric 'accuracy'"),
        (("--metric", "no_such:thing"), 2, "cannot load the metric 'no_such:thing': ModuleNotFoundError"),
        (("--metric", "map"), 2, "the metric map fits no output"),
        (("--metric-output", "z"), 2, "the model has no output 'z'"),
        (("--max-output-error", "a lot"), 2, "'a lot' is not a fraction"),
        (("-o", "notes.txt"), 8, "'notes.txt' exists and is not a bundle"),
        (("--p99", "1us", "--budget", "10ms"), 4, "no candidate meets the contract; latency: the lowest p99"),
    ],
)
def test_mistakes_are_told_with_their_fix(
    penstock, folder: Path, options: tuple[str, ...], code: int, cause: str
) -> None:
    (folder / "notes.txt").write_text("mine")
    before = sorted(folder.iterdir())
    arguments = {"--evaluate": "data.npz", "--engine": "onnxruntime", "--threads": "1", "-o": "out.bundle"}
    arguments |= dict(zip(options[::2], options[1::2], strict=True))
    done = penstock("build", "linear.onnx", *(part for pair in arguments.items() for part in pair), "--json")
    assert done.code == code
    assert cause in done.err
    assert "  fix: " in done.err
    assert "Traceback" not in done.err
    assert done.json["error"]["message"] in done.err
    assert sorted(folder.iterdir()) == before


def test_a_model_that_is_not_one(penstock, folder: Path) -> None:
    (folder / "bad.onnx").write_text("not a model")
    done = penstock("build", "bad.onnx", "--evaluate", "data.npz", "-o", "out.bundle")
    assert done.code == 2
    assert "error: the file is not an ONNX model" in done.err
    assert penstock("build", "none.onnx", "--evaluate", "data.npz", "-o", "out.bundle").code == 3
    assert penstock("build", "data.npz", "--evaluate", "data.npz", "-o", "out.bundle").code == 2


def test_an_unmet_contract_tells_scripts_of_every_candidate(penstock, folder: Path) -> None:  # type: ignore[no-untyped-def]
    done = penstock(
        "build",
        "linear.onnx",
        "--evaluate",
        "data.npz",
        "--p99",
        "0.000001ms",
        "--budget",
        "0.2",
        "--json",
        "--engine",
        "onnxruntime",
        "--threads",
        "1",
        "-o",
        "out.bundle",
    )
    assert done.code == 4
    assert done.json["error"]["code"] == "FAILED_PRECONDITION"
    assert {one["name"] for one in done.json["candidates"]} == {"original-t1", "onnxruntime-fp32-t1"}
    assert not (folder / "out.bundle").exists()


@pytest.mark.parametrize("target", ["linear.onnx", "data.npz"])
def test_what_is_read_is_never_written(penstock, folder: Path, target: str) -> None:  # type: ignore[no-untyped-def]
    before = (folder / target).read_bytes()
    for options in (("-o", target, "--force"), ("-o", "out.bundle", "--report", target)):
        done = penstock("build", "linear.onnx", "--evaluate", "data.npz", *options)
        assert done.code == 2
        assert "is an input of this command" in done.err
    assert (folder / target).read_bytes() == before
    assert not (folder / "out.bundle").exists()


@pytest.mark.parametrize("report", ["out.bundle", "out.bundle/report.html"])
def test_the_report_is_not_written_into_the_bundle(penstock, folder: Path, report: str) -> None:  # type: ignore[no-untyped-def]
    done = penstock("build", "linear.onnx", "--evaluate", "data.npz", "-o", "out.bundle", "--report", report)
    assert done.code == 2
    assert "cannot be inside the bundle" in done.err


@pytest.mark.parametrize(("option", "made"), [("--synthetic", 256), ("--synthetic=20", 20)])
def test_synthetic_samples_are_said_to_be_so_everywhere(penstock, folder: Path, option: str, made: int) -> None:
    done = penstock("build", option, "linear.onnx", *QUICK, "-o", "out.bundle", "--report", "report.html", "--json")
    assert done.code == 0, done.err
    assert done.json["synthetic"] == made
    assert {one["precision"] for one in done.json["candidates"]} == {"fp32", "int8"}
    note = f"calibrated and judged on {made} synthetic samples each: accuracy means fidelity to the original on them"
    assert any(note in one for one in done.json["notes"])
    evidence = open_bundle(folder / "out.bundle").manifest.evidence
    assert evidence is not None
    assert evidence.synthetic == made
    assert note in (folder / "report.html").read_text()
    shown = penstock("inspect", "out.bundle").out
    assert note in shown
    assert "judged on synthetic samples, so only fidelity to the original is known" in shown


def test_a_build_on_data_says_nothing_of_synthetic_samples(penstock, folder: Path) -> None:
    done = penstock("build", "linear.onnx", *DATA, *QUICK, "-o", "out.bundle", "--json")
    assert done.json["synthetic"] == 0
    assert "synthetic" not in penstock("inspect", "out.bundle").out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--synthetic", "--prove-accuracy"), "--prove-accuracy needs real data"),
        (("--synthetic", "--calibrate", "data.npz"), "--synthetic cannot be combined"),
        (("--synthetic", "--evaluate", "data.npz"), "--synthetic cannot be combined"),
        ((), "or --synthetic, which measures fidelity"),
    ],
)
def test_what_synthetic_samples_cannot_do(penstock, folder: Path, options: tuple[str, ...], reason: str) -> None:
    done = penstock("build", "linear.onnx", *options, *QUICK, "-o", "out.bundle")
    assert done.code == 2
    assert reason in done.err
    assert not (folder / "out.bundle").exists()
