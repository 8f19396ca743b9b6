"""Train centroids after clustering. A centroid's gradient is the sum of the gradients of its weights (Han et al. 2016, §3.3).

The assignment of weights to centroids does not change, and zeros stay zero.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.sharing.layers import find_layers
from penstock.offline.compress.taps import Progress, no_progress
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.optimize.model import load_model
from penstock.tensor import Array


class CentroidOptions(msgspec.Struct, frozen=True):
    """Options of the training."""

    fit: FitOptions = FitOptions(epochs=20, learning_rate=1e-4)
    """Options of the training loop. Han et al. use a hundredth of the original learning rate."""
    half_codebooks: bool = True
    """Keep FP16 centroids in FP16. Training rounds the centroids in each step."""
    max_centroids: int = 4096
    """A tensor with more distinct values than this number is not considered clustered. It stays unchanged."""


class SharedWeight:
    """A hook for ``TrainableModel.weight_hooks`` that computes a weight from its trainable centroids."""

    def __init__(self, array: Array, half: bool) -> None:
        values = np.unique(array)
        values = values[values != 0]
        # Index 0 is the value zero, which is not trained.
        index = np.where(array == 0, 0, np.searchsorted(values, array) + 1)
        self.centroids = nn.Parameter(torch.tensor(values))
        self._index = torch.tensor(index.reshape(-1))
        self._shape = array.shape
        self._half = half and bool((values.astype(np.float16).astype(values.dtype) == values).all())

    def __call__(self, _: Tensor) -> Tensor:
        centroids = self.centroids
        if self._half:  # a cast passes gradients on
            centroids = centroids.to(torch.float16).to(centroids.dtype)
        every = torch.cat([centroids.new_zeros(1), centroids])
        return every.index_select(0, self._index).reshape(self._shape)


def tune_centroids(
    artifact: Artifact,
    teacher: Artifact,
    data: Dataset,
    options: CentroidOptions | None = None,
    on_progress: Progress = no_progress,
) -> Artifact:
    """Train the centroids of ``artifact``, a result of ``share``, to reproduce the outputs of ``teacher``, the unclustered model.

    Raises Unsupported if no FP32 weight is shared or the model cannot be trained, and the errors of ``recover``.
    """
    options = options or CentroidOptions()
    model = TrainableModel(artifact)
    shared = _shared_weights(artifact, model, options)
    model.weight_hooks.update(shared)
    parameters = [weight.centroids for weight in shared.values()]
    report = recover(model, data, teacher, options.fit, parameters=parameters, on_progress=on_progress)
    facts: dict[str, Any] = {**report.facts(), "centroids": {name: len(w.centroids) for name, w in shared.items()}}
    return model.to_artifact("tune-centroids", msgspec.to_builtins(options), facts)


def _shared_weights(artifact: Artifact, model: TrainableModel, options: CentroidOptions) -> dict[str, SharedWeight]:
    found = {}
    for name, layer in find_layers(load_model(artifact)).items():
        distinct = len(np.unique(layer.array))
        if name in model.weights and 1 < distinct <= min(options.max_centroids, layer.array.size // 2):
            found[name] = SharedWeight(layer.array, options.half_codebooks)
    if not found:
        raise Unsupported("no FP32 weight of the model has shared values", "run penstock share (in Python share) first")
    return found
