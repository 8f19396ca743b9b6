from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import models
from bundles import packed
from evidences import QUIET, evidence, points, record
from penstock.bundle.manifest import ServingConfig, Variant
from penstock.bundle.pack_model import pack_model

EVIDENCE = evidence(
    record(
        "int8-best",
        0.4,
        0.985,
        precision="int8",
        calibration="best-wide",
        status="chosen",
        reason="2.5x the original's speed",
    ),
    record("int8-second", 0.5, 0.985, precision="int8", calibration="mse-wide", reason="0.80x the chosen one's speed"),
    record(
        "int8-third", 0.6, 0.985, precision="int8", calibration="entropy-wide", reason="0.67x the chosen one's speed"
    ),
    record("wrong", 0.3, 0.5, precision="int8", status="rejected", reason="loses 49.00% top-1"),
    record("broken", None, engine="openvino", status="failed", reason="cannot load"),
    p99_ms=5.0,
    notes=("a note",),
    optimization={"nodes_before": 30, "nodes_after": 21, "passes": []},
)
VARIANTS = (Variant("int8-best", "model.onnx", "onnxruntime", "int8"),)
SERVING = ServingConfig("int8-best", 1, 2, 4, points(0.4))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return packed(tmp_path / "test.bundle", evidence=EVIDENCE, variants=VARIANTS, serving=SERVING)


def test_a_person_sees_what_was_chosen_and_why_others_lost(penstock, bundle: Path) -> None:
    done = penstock("inspect", bundle)
    assert done.code == 0
    for fact in (
        "test  x FP32[N, 2] → y FP32[N, 2]",
        "served as ONNX Runtime · INT8 (tuned ranges, more operators) · 1 thread: 2 instance(s) × 1 thread(s), batches up to 4",
        "at most 1.00% loss of accuracy, p99 within 5 ms",
        "30 nodes, 21 after the passes",
        "chosen: 2.5x the original's speed",
        "less accurate than allowed: loses 49.00% top-1",
        "failed: cannot load",
        "Penstock tried 5 candidates, of which 4 were timed;",
        "a note",
        "verified",
        "measured on Test CPU",
    ):
        assert fact in done.out, fact
    # Of each kind only the best; --all shows the rest.
    assert "MSE ranges" in done.out
    assert "entropy ranges" not in done.out
    assert "entropy ranges" in penstock("inspect", bundle, "--all").out


def test_the_verdict_says_that_the_machine_was_busy(penstock, tmp_path: Path) -> None:
    busy = msgspec.structs.replace(QUIET, dirty=True, busy="other processes used 1.2 of 2 cores")
    measured = msgspec.structs.replace(EVIDENCE, conditions=busy)
    path = packed(tmp_path / "test.bundle", evidence=measured, variants=VARIANTS, serving=SERVING)
    shown = " ".join(penstock("inspect", path).out.split())
    assert "(95 %: 2.25 … 2.75); measured on a busy machine (other processes used 1.2 of 2 cores)" in shown


def test_formats_files_version_and_source_are_shown(penstock, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    import openvino_models  # noqa: PLC0415 - the package is optional

    artifact = openvino_models.linear()
    pack_model(artifact, tmp_path / "ir.bundle", version="7")
    done = penstock("inspect", tmp_path / "ir.bundle")
    assert done.code == 0
    assert f"version 7, made from {artifact.name} (sha256:{artifact.digest[:16]}" in done.out
    assert "openvino is stored as openvino_ir in 2 file(s)" in done.out
    manifest = penstock("inspect", tmp_path / "ir.bundle", "--json").json["manifest"]
    assert (manifest["version"], manifest["schema_version"]) == ("7", 3)
    assert manifest["source"]["format"] == "openvino_ir"


@pytest.mark.parametrize(("name", "has"), [("schema-1", "served as int8"), ("schema-2", "fp32 is coded in")])
def test_bundles_of_older_schemas(penstock, name: str, has: str) -> None:
    done = penstock("inspect", Path(__file__).parent.parent / "bundle" / "golden" / f"{name}.bundle")
    assert done.code == 0
    assert has in done.out
    assert "version 1" in done.out


def test_another_machine_is_noted(penstock, bundle: Path) -> None:
    assert "CPU: measured on Test CPU, here" in penstock("inspect", bundle).out


def test_json_is_the_manifest_with_its_digest(penstock, bundle: Path) -> None:
    found = penstock("inspect", bundle, "--json").json
    assert len(found["digest"]) == 64
    assert found["manifest"]["name"] == "test"
    assert found["manifest"]["evidence"]["chosen"] == "int8-best"
    assert found["titles"]["wrong"] == {
        "title": "ONNX Runtime · INT8 · 1 thread",
        "outcome": "less accurate than allowed",
    }
    assert any("CPU" in difference for difference in found["differences"])


def test_the_report_can_be_written_again(penstock, bundle: Path, tmp_path: Path) -> None:
    done = penstock("inspect", bundle, "--report", tmp_path / "report.html")
    assert done.code == 0
    assert "int8-best" in (tmp_path / "report.html").read_text()


def test_the_report_replaces_nothing_but_a_report(penstock, bundle: Path, tmp_path: Path) -> None:
    report, thesis = tmp_path / "report.html", tmp_path / "thesis.html"
    assert penstock("inspect", bundle, "--report", report).code == 0
    assert penstock("inspect", bundle, "--report", report).code == 0
    thesis.write_text("a year's work")
    done = penstock("inspect", bundle, "--report", thesis)
    assert done.code == 8
    assert "is not a Penstock build report" in done.err
    assert thesis.read_text() == "a year's work"


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_the_report_leaves_the_bundle_whole(penstock, folder: bool, tmp_path: Path) -> None:
    bundle = packed(tmp_path / "b.bundle", folder=folder)
    for target in (bundle, bundle / "report.html"):
        assert penstock("inspect", bundle, "--report", target).code == 2
    assert penstock("inspect", bundle).code == 0


def test_a_bundle_without_evidence(penstock, tmp_path: Path) -> None:
    done = penstock("inspect", packed(tmp_path / "plain.bundle"))
    assert done.code == 0
    assert "served as fp32" in done.out


def test_a_coded_variant_has_two_sizes(penstock, tmp_path: Path) -> None:
    variant = Variant("small", "model.onnx", "onnxruntime", "fp32", {}, (), "coded", 4096, "0" * 64)
    serving = ServingConfig("small", 1, 1, max_batch=8)
    path = packed(tmp_path / "a.bundle", variants=(variant,), serving=serving)
    assert "small is coded in 0.0 KiB, 4.0 KiB after loading" in penstock("inspect", path).out


def test_names_with_markup_are_shown_as_they_are(penstock, tmp_path: Path) -> None:
    evil = "[/bold] [red]x[/red] [link=http://evil]"
    found = evidence(record(evil, 0.5, reason=evil), notes=(evil,))
    done = penstock("inspect", packed(tmp_path / "evil.bundle", name=evil, evidence=found), "--all")
    assert done.code == 0
    assert done.out.count(evil) >= 3


def test_what_cannot_be_inspected(penstock, bundle: Path, tmp_path: Path) -> None:
    assert penstock("inspect", tmp_path / "none.bundle").code == 3
    data = bytearray(bundle.read_bytes())
    data[-100] ^= 1
    bundle.write_bytes(data)
    done = penstock("inspect", bundle)
    assert done.code == 5
    assert "error: " in done.err
    assert "Traceback" not in done.err


def test_a_template_has_the_names_types_and_shapes_of_the_inputs(penstock, tmp_path: Path) -> None:
    model, data = tmp_path / "linear.onnx", tmp_path / "samples.npz"
    model.write_bytes(models.linear().data)
    done = penstock("inspect", model, "--template", data)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-2:] == [
        f"next      penstock build {model} --calibrate {data} -o linear.bundle",
        f"template  {data}",
    ]
    with np.load(data) as found:
        assert {name: (array.dtype, array.shape) for name, array in found.items()} == {"x": (np.float32, (4, 3))}
    assert penstock("infer", model, "--inputs", data).code == 0


def test_a_template_for_a_bundle(penstock, tmp_path: Path) -> None:
    pack_model(models.linear(), tmp_path / "m.bundle")
    done = penstock("inspect", tmp_path / "m.bundle", "--template", tmp_path / "samples.npz")
    assert done.code == 0, done.err
    assert "input   x: features (3 number(s) per row)" in done.out
    with np.load(tmp_path / "samples.npz") as found:
        assert found["x"].shape == (4, 3)


def test_a_template_replaces_no_file_and_is_an_npz(penstock, tmp_path: Path) -> None:
    model, data = tmp_path / "linear.onnx", tmp_path / "samples.npz"
    model.write_bytes(models.linear().data)
    data.write_bytes(b"a year's work")
    assert penstock("inspect", model, "--template", data).code == 8
    assert data.read_bytes() == b"a year's work"
    done = penstock("inspect", model, "--template", model)
    assert (done.code, "named like an npz file" in done.err) == (2, True)
    assert model.read_bytes() == models.linear().data


def test_json_of_a_model_has_every_fact(penstock, tmp_path: Path) -> None:
    model = tmp_path / "linear.onnx"
    model.write_bytes(models.linear().data)
    facts = penstock("inspect", model, "--json").json
    assert facts["inputs"] == [
        {
            "name": "x",
            "datatype": "FP32",
            "shape": [-1, 3],
            "role": "features",
            "meaning": "features (3 number(s) per row)",
        }
    ]
    assert facts["axes"] == {"x": ["N", ""], "y": ["N", ""]}
    assert (facts["parameters"], facts["operators"], facts["has_rows"]) == (6, {"MatMul": 1}, True)
    assert facts["sample_shapes"] == {"x": [1, 3]}
    assert facts["next_command"].startswith("penstock build ")
    assert {engine["name"] for engine in facts["engines"]} == {"onnxruntime", "openvino"}
