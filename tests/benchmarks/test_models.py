"""The models with random weights are what they are called, and the same every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks import models
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    first, second = models.mlp(tmp_path / "mlp.onnx").read_bytes(), models.mlp(tmp_path / "mlp.onnx").read_bytes()
    assert first == second


def test_models_answer_row_for_row(tmp_path: Path) -> None:
    for make, shape in ((models.mlp, (32,)), (models.small_cnn, (3, 64, 64))):
        model = get_engine("onnxruntime").load(Artifact.from_file(make(tmp_path / "model.onnx")), {"threads": 1})
        rows = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
        together = model.forward({"input": rows})["output"]
        alone = np.concatenate([model.forward({"input": rows[row : row + 1]})["output"] for row in range(3)])
        assert np.isfinite(together).all()
        np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-4)


def test_random_weights_tell_inputs_apart(tmp_path: Path) -> None:
    """Signals neither vanish nor explode through the layers, or INT8 would be measured on constants."""
    model = get_engine("onnxruntime").load(Artifact.from_file(models.small_cnn(tmp_path / "cnn.onnx")), {"threads": 1})
    rows = np.random.default_rng(1).standard_normal((8, 3, 64, 64)).astype(np.float32)
    outputs = model.forward({"input": rows})["output"]
    assert 1e-3 < outputs.std(axis=0).mean() < 1e3
