"""Bundles of every schema version, served: given by hand, in a repository, in a process of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as client

import models
from penstock.bundle.pack_model import pack_model
from processes import ServerProcess

GOLDEN = Path(__file__).parent.parent / "bundle" / "golden"


def served(process: ServerProcess, name: str, matrix: np.ndarray, version: str = "1") -> None:
    """Assert that ``version`` of the model ``name`` multiplies with ``matrix``."""
    host, port = process.address
    x = np.random.default_rng(1).standard_normal((5, len(matrix)), np.float32)
    tensor = client.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    answer = client.InferenceServerClient(f"{host}:{port}").infer(name, [tensor])
    assert answer.get_response()["model_version"] == version
    np.testing.assert_allclose(answer.as_numpy("y"), x @ matrix, rtol=1e-4, atol=1e-5)


PLAIN = models.linear_weight(3, 2)
CODED = np.random.default_rng(0).choice(np.float32([0, 0, 0, 0.5, -0.25]), (64, 64))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_given_by_hand(isolation: str) -> None:
    with ServerProcess(GOLDEN / "schema-1.bundle", GOLDEN / "schema-2.bundle", isolation=isolation) as process:
        served(process, "plain", PLAIN)
        served(process, "coded", CODED)


def test_in_a_repository(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    shutil.copy(GOLDEN / "schema-2.bundle", tmp_path / "m" / "1" / "model.bundle")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "penstock"')
    with ServerProcess(arguments=("--model-repository", str(tmp_path))) as process:
        served(process, "m", CODED)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_models_of_several_files_under_their_version(isolation: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    import openvino_models  # noqa: PLC0415 - the package is optional

    pack_model(models.external_linear(tmp_path), tmp_path / "external.bundle", version="3")
    (tmp_path / "w.bin").unlink()
    pack_model(openvino_models.linear(), tmp_path / "ir.bundle")
    targets = tmp_path / "external.bundle", tmp_path / "ir.bundle"
    with ServerProcess(*targets, isolation=isolation) as process:
        served(process, "external", PLAIN, "3")
        served(process, "ir", PLAIN)
