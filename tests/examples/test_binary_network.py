"""Binary weights have two values per channel, and the network is accurate after training."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.samples.open import load_dataset

pytest.importorskip("torch", reason="binary networks are trained with torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds alone, but threads wait for each other on a busy machine
def test_inner_layers_become_signs_and_learn() -> None:
    example = runpy.run_path(str(EXAMPLES / "binary_network" / "binary.py"))
    digits = EXAMPLES / "digits"
    artifact = Artifact.from_file(digits / "model.onnx")
    loaded = get_engine("onnxruntime").load(artifact, {"threads": 1})
    train, test = (load_dataset(digits / f"{name}.npz", loaded.signature) for name in ("calibrate", "evaluate"))
    found = example["binarize"](artifact, train, test, example["FitOptions"](epochs=15, learning_rate=5e-3))
    assert found.untrained.accuracy.value < 0.5
    assert found.trained.accuracy.value > 0.9
    weights = [numpy_helper.to_array(t) for t in onnx.load_model_from_string(found.artifact.data).graph.initializer]
    convolutions = [weight for weight in weights if weight.ndim == 4]
    binary = [weight for weight in convolutions if all(len(np.unique(np.abs(channel))) == 1 for channel in weight)]
    assert len(binary) == len(convolutions) - 1
    assert sum(weight.size for weight in binary) == found.binary_weights
    assert found.packed_bytes < found.artifact.size_bytes / 10
