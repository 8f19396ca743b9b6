from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from evidences import evidence
from penstock.artifact import file_entries, sha256
from penstock.bundle.manifest import MANIFEST, MANIFEST_DIGEST, PipelineManifest, decode, encode
from penstock.bundle.open import is_pipeline, open_bundle
from penstock.bundle.pack import write_zip
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pipeline import GOLDEN, PIPELINE, load_models, local_models, open_any, open_pipeline
from penstock.errors import IntegrityError, Unsupported
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.pipeline import load_any
from penstock.online.repository.resolved_version import LoadOptions
from penstock.pipeline.direct import Direct
from penstock.pipeline.golden import Golden, observed
from penstock.pipeline.steps.image.fuse import Fused
from penstock.pipeline.streaming.models import LocalModel
from penstock.pipeline.value import Value
from picture_pipelines import pack_corners
from pipelines import WEIGHT, scores_bundle, scores_folder

INNER = "models/linear.bundle"


def forged(path: Path, change: Callable[[dict[str, bytes]], None], **fields: Any) -> Path:
    """The bundle at ``path`` with other content, whose digests are those of the content."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = decode(files.pop(MANIFEST))
    del files[MANIFEST_DIGEST]
    change(files)
    data = encode(msgspec.structs.replace(manifest, files=file_entries(files), **fields))
    write_zip(path, {MANIFEST: data, MANIFEST_DIGEST: sha256(data).encode(), **files})
    return path


def test_a_pipeline_is_no_model_and_a_model_is_no_pipeline(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    pack_model(tmp_path / "linear.onnx", tmp_path / "linear.bundle")
    assert is_pipeline(path)
    assert not is_pipeline(tmp_path / "linear.bundle")
    assert not is_pipeline(tmp_path / "linear.onnx")
    with pytest.raises(Unsupported, match="contains a pipeline, not one model"):
        open_bundle(path)
    with pytest.raises(Unsupported, match="contains a model, not a pipeline"):
        open_pipeline(tmp_path / "linear.bundle")
    assert open_any(path).name == "scores"
    with pytest.raises(Unsupported):
        penstock.Model.open(path)


def test_every_byte_is_protected(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    data = path.read_bytes()
    for place in range(0, len(data), len(data) // 40):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises((IntegrityError, penstock.PenstockError)):
            penstock.open(path)


def _steps(files: dict[str, bytes], **changes: Any) -> None:
    data = msgspec.json.decode(files[PIPELINE])
    data.update(changes)
    files[PIPELINE] = msgspec.json.encode(data)


def _other_softmax(files: dict[str, bytes]) -> None:
    data = msgspec.json.decode(files[PIPELINE])
    data["steps"][1] = {**data["steps"][1], "step": "sigmoid"}
    files[PIPELINE] = msgspec.json.encode(data)


def _other_label(files: dict[str, bytes]) -> None:
    _steps(files, labels={"pair": ["maybe", "perhaps"]})


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (_other_softmax, {}, "refused: example 1 .* step 'softmax' is the first that differs: in 'p'"),
        (_other_label, {}, "step 'top_k' is the first that differs: in 'label', element 0: its content is different"),
        (
            lambda files: _steps(files, outputs=["none"]),
            {},
            "contains a wrong pipeline: .*no step produces output 'none'",
        ),
        (lambda files: files.update({PIPELINE: b"[" * 10_000}), {}, "cannot be read"),
        (lambda files: files.update({PIPELINE: b"{}"}), {}, "cannot be read: .*'name' is missing"),
        (lambda files: files.update({GOLDEN: b"[]"}), {}, "cannot be read"),
        (lambda files: files.pop(GOLDEN), {}, "names a file that it does not list: golden.json"),
        (lambda files: files.pop(INNER), {}, f"names a file that it does not list: {INNER}"),
        (lambda files: files.update({INNER: b"PK"}), {}, "'linear.bundle' is not a Penstock bundle"),
        (lambda files: None, {"version": "x"}, "not a whole number"),
        (lambda files: None, {"python": ("files/my.py",)}, "names a file that it does not list"),
        (lambda files: files.update({"extra": b""}), {"models": {}}, "wrong pipeline: .*no model 'linear'"),
    ],
)
def test_forged_bundles_are_refused(
    change: Callable[[dict[str, bytes]], None], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = forged(scores_bundle(tmp_path), change, **fields)
    with pytest.raises(IntegrityError, match=message):
        penstock.open(path)


def test_a_model_cannot_be_exchanged(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    scores_folder(tmp_path)
    pack_model(tmp_path / "linear.onnx", tmp_path / "other.bundle", name="other")
    other = (tmp_path / "other.bundle").read_bytes()
    with pytest.raises(IntegrityError, match="model 'linear' of bundle 'scores.bundle' does not match its digest"):
        open_pipeline(forged(path, lambda files: files.update({INNER: other})))


def test_a_pipeline_in_a_pipeline_is_refused(tmp_path: Path) -> None:
    path = scores_bundle(tmp_path)
    inner, digest = path.read_bytes(), open_pipeline(path).digest
    models = {"linear": {"file": INNER, "digest": digest}}
    fields = {"models": msgspec.convert(models, dict[str, type(open_pipeline(path).manifest.models["linear"])])}
    with pytest.raises(IntegrityError, match="is not a model"):
        open_pipeline(forged(path, lambda files: files.update({INNER: inner}), **fields))


def test_examples_of_another_variant_are_not_compared(tmp_path: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        _other_softmax(files)
        golden = msgspec.json.decode(files[GOLDEN], type=Golden)
        files[GOLDEN] = msgspec.json.encode(msgspec.structs.replace(golden, variants={"linear": "int8"}))

    penstock.open(forged(scores_bundle(tmp_path), change)).close()


@pytest.mark.parametrize(("precision", "allowed", "refused"), [("fp32", 1.00005, 1.001), ("int8", 1.04, 1.2)])
def test_models_that_are_not_in_fp32_have_a_tolerance_of_five_percent(
    precision: str, allowed: float, refused: float, tmp_path: Path
) -> None:
    opened = open_pipeline(scores_bundle(tmp_path))
    bundle = opened.models["linear"]
    (variant,) = bundle.manifest.variants
    changed = (msgspec.structs.replace(variant, precision=precision),)
    bundle.manifest = msgspec.structs.replace(bundle.manifest, variants=changed)

    def replay(factor: float) -> None:
        model = LocalModel(lambda inputs: {"y": inputs["x"] @ WEIGHT * np.float32(factor)})
        opened.replay(Direct(observed(opened.function()), {"linear": model}), {"linear": variant.name})

    replay(allowed)
    with pytest.raises(IntegrityError, match="in 'logits', it differs by"):
        replay(refused)


def test_an_example_without_its_file(tmp_path: Path) -> None:
    def change(files: dict[str, bytes]) -> None:
        golden = msgspec.json.decode(files[GOLDEN])
        golden["examples"][0]["inputs"]["features"] = {"file": "examples/1/none.png"}
        files[GOLDEN] = msgspec.json.encode(golden)

    with pytest.raises(IntegrityError, match="lacks the file 'examples/1/none.png'"):
        open_pipeline(forged(scores_bundle(tmp_path), change))


def test_the_manifest_is_that_of_a_pipeline(tmp_path: Path) -> None:
    opened = open_pipeline(scores_bundle(tmp_path))
    assert isinstance(opened.manifest, PipelineManifest)
    assert (opened.name, opened.manifest.schema_version, len(opened.golden.examples)) == ("scores", 5, 2)
    assert opened.manifest.tools["penstock"] == penstock.__version__


def test_the_batch_of_a_model_is_measured_if_a_build_did(tmp_path: Path) -> None:
    opened = open_pipeline(scores_bundle(tmp_path))
    loaded = load_models(opened.models)
    assert not local_models(opened.models, loaded)["linear"].is_tuned
    bundle = opened.models["linear"]
    bundle.manifest = msgspec.structs.replace(bundle.manifest, evidence=evidence())
    assert local_models(opened.models, loaded)["linear"].is_tuned
    loaded["linear"].loaded.unload()


def test_steps_that_calls_run_joined_are_replayed_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, run = pack_corners(tmp_path), Fused.run

    def darker(step: Fused, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"value": run(step, inputs)["value"] * np.float32(0.5)}

    monkeypatch.setattr(Fused, "run", darker)
    message = r"step 'resize\+normalise' is the first that differs: in 'scaled', it differs by"
    with pytest.raises(IntegrityError, match=message):
        penstock.open(bundle)
    (version := tmp_path / "root" / "corners" / "1").mkdir(parents=True)
    bundle.rename(version / bundle.name)
    layout = Layout((tmp_path / "root",))
    with pytest.raises(IntegrityError, match=message):
        load_any(layout, layout.define("corners"), "1", LoadOptions())
