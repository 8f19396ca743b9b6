"""Fuzzes the import into torch: the module's outputs are ONNX Runtime's, and an untrained model is written as it was read."""

from __future__ import annotations

import numpy as np

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, PenstockError
from penstock.offline.compress.training.parity import check_parity
from penstock.offline.compress.training.trainable import TrainableModel
from tests.fuzz.offline import LOOSE, TOLERANCES, ModelTarget, agree, data_of, optimized
from tests.random_models import RandomModel


class TrainerTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        start = optimized(artifact)
        module = TrainableModel(start)
        check_parity(module, data_of(model, start), tolerance=TOLERANCES.get(np.dtype(model.float), LOOSE))
        agree(start, module.to_artifact("fuzz", {}, {}), model)

    def refuses(self, error: PenstockError) -> bool:
        return super().refuses(error) or isinstance(error, InvalidArgument)
