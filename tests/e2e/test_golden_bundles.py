"""Bundles of earlier schema versions, served: given by hand, in a repository, in a process of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as client

import models
from processes import ServerProcess

GOLDEN = Path(__file__).parent.parent / "bundle" / "golden"


def served(process: ServerProcess, name: str, matrix: np.ndarray) -> None:
    """Assert that the model ``name`` multiplies with ``matrix``."""
    host, port = process.address
    x = np.random.default_rng(1).standard_normal((5, len(matrix)), np.float32)
    tensor = client.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    answer = client.InferenceServerClient(f"{host}:{port}").infer(name, [tensor])
    assert answer.get_response()["model_version"] == "1"
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
