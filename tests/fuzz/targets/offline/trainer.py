"""Fuzzes the import into torch: the module's outputs are ONNX Runtime's, and an untrained model is written as it was read."""

from __future__ import annotations

from penstock.artifact import Artifact
from penstock.offline.compress.training.parity import parity
from penstock.offline.compress.training.trainable import TrainableModel
from tests.fuzz.offline import ModelTarget, agree, data_of, optimized
from tests.random_models import RandomModel

_TOLERANCE = 1e-3


class TrainerTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        start = optimized(artifact)
        module = TrainableModel(start)
        error = parity(module, data_of(model, start))
        assert error <= _TOLERANCE, f"torch differs from ONNX Runtime by {error:.2g}"
        agree(artifact, module.to_artifact("fuzz", {}, {}), model)
