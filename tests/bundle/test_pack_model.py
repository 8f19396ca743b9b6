"""Models of any format that are packed unchanged give the same outputs from the bundle as from their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import models
import penstock
from penstock.artifact import Artifact, Format
from penstock.bundle.manifest import Manifest
from penstock.bundle.open import open_bundle
from penstock.bundle.pack import code_variants
from penstock.bundle.pack_model import pack_model
from penstock.errors import AlreadyExists, InvalidArgument, InvalidConfig, InvalidModel, Unsupported

X = np.random.default_rng(0).standard_normal((10, 3), np.float32)


def answers(bundle: Path) -> np.ndarray:
    with penstock.open(bundle) as model:
        return model.infer_rows({"x": X}, batch=1)["y"]


def test_an_onnx_model_needs_no_new_schema(tmp_path: Path) -> None:
    manifest = pack_model(models.linear(), tmp_path / "linear.bundle", options={"threads": 1}, version="3")
    bundle = open_bundle(tmp_path / "linear.bundle")
    assert (bundle.name, bundle.manifest) == ("linear", manifest)
    assert (manifest.schema_version, manifest.version) == (1, "3")
    assert (manifest.serving.threads, manifest.serving.max_batch) == (1, 64)
    assert manifest.source is not None
    assert (manifest.source.digest, manifest.source.format) == (models.linear().digest, Format.ONNX)
    np.testing.assert_allclose(answers(tmp_path / "linear.bundle"), X @ models.linear_weight(), rtol=1e-5)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_an_onnx_model_brings_its_external_data(engine: str, folder: bool, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    path = tmp_path / "m.onnx" if folder else tmp_path
    path.mkdir(exist_ok=True)
    external = models.external_linear(path)
    if folder:
        external = external.rename(path / "model.onnx").parent
    manifest = pack_model(external, tmp_path / "a.bundle", engine)
    assert manifest.source is not None
    assert manifest.source.file == ("model.onnx" if folder else "m.onnx")
    (path / "w.bin").unlink()
    (variant,) = open_bundle(tmp_path / "a.bundle").manifest.variants
    assert [Path(name).name for name in variant.beside] == ["w.bin"]
    np.testing.assert_allclose(answers(tmp_path / "a.bundle"), X @ models.linear_weight(), rtol=1e-5)


def test_an_openvino_model_brings_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    import openvino_models  # noqa: PLC0415 - the package is optional

    artifact = openvino_models.linear()
    manifest = pack_model(artifact, tmp_path / "a.bundle", name="ir")
    (variant,) = manifest.variants
    assert (manifest.name, variant.engine, variant.format) == ("ir", "openvino", Format.OPENVINO_IR)
    bundle = open_bundle(tmp_path / "a.bundle")
    assert bundle.manifest.schema_version == 3
    assert bundle.artifact(bundle.manifest.variants[0]).digest == artifact.digest
    np.testing.assert_allclose(answers(tmp_path / "a.bundle"), X @ models.linear_weight(), rtol=1e-5)


def test_a_tensorflow_lite_model(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    import tflite_models  # noqa: PLC0415 - the package is optional

    pack_model(tflite_models.linear(), tmp_path / "a.bundle", options={"threads": 1, "free_batch": True})
    np.testing.assert_allclose(answers(tmp_path / "a.bundle"), X @ models.linear_weight(), rtol=1e-5)


def test_a_program_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch_models  # noqa: PLC0415 - the package is optional

    manifest = pack_model(torch_models.PROGRAMS.linear(), tmp_path / "a.bundle")
    assert manifest.variants[0].format is Format.EXPORTED_PROGRAM
    np.testing.assert_allclose(answers(tmp_path / "a.bundle"), X @ models.linear_weight(), rtol=1e-5)


def test_a_saved_model(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    import tensorflow_models  # noqa: PLC0415 - the package is optional

    pack_model(tensorflow_models.linear(), tmp_path / "a.bundle")
    np.testing.assert_allclose(answers(tmp_path / "a.bundle"), X @ models.linear_weight(), rtol=1e-5)


def test_only_plain_onnx_variants_are_coded(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    import openvino_models  # noqa: PLC0415 - the package is optional

    pack_model(openvino_models.linear(), tmp_path / "a.bundle")
    bundle = open_bundle(tmp_path / "a.bundle")
    files = {entry.path: bundle.read(entry.path) for entry in bundle.manifest.files}
    assert code_variants(bundle.manifest, files) == (bundle.manifest, files)


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    def pack(model: Artifact, target: str = "a.bundle", **arguments: str) -> Manifest:
        return pack_model(model, tmp_path / target, **arguments)

    with pytest.raises(InvalidConfig, match=r"'1\.2' is not a model version \(give a whole number"):
        pack(models.linear(), version="1.2")
    with pytest.raises(InvalidArgument, match="'a/b' is not a valid model name"):
        pack(models.linear(), name="a/b")
    with pytest.raises(Unsupported, match=r"'tflite' does not run ONNX models \(use onnxruntime, openvino"):
        pack(models.linear(), engine="tflite")
    with pytest.raises(Unsupported, match="Python models cannot be in a bundle"):
        pack(Artifact.from_bytes(b"x = 1", Format.PYTHON))
    with pytest.raises(InvalidModel):
        pack(Artifact.from_bytes(b"not a model"))
    assert list(tmp_path.iterdir()) == []
    pack(models.linear())
    with pytest.raises(AlreadyExists):
        pack(models.linear())
