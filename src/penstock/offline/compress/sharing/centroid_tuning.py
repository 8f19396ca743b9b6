"""Centroids trained after sharing: the gradient of a centroid is the sum of the gradients of its members (Han et al. 2016, §3.3).

Which weight belongs to which centroid does not change, and zeros stay zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.sharing.layers import find_layers
from penstock.offline.compress.training.distill import recover
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.optimize.model import load_model
from penstock.tensor import Array


class CentroidOptions(msgspec.Struct, frozen=True):
    """How to train centroids."""

    fit: FitOptions = FitOptions(epochs=20, learning_rate=1e-4)
    """The paper trains them a hundred times more slowly than the weights."""
    half_codebooks: bool = True
    """Keep centroids that are FP16 numbers so, training through the rounding."""
    max_centroids: int = 4096
    """Tensors with more distinct values are no codebooks, and stay as they are."""


class SharedWeight:
    """A hook for ``TrainableModel.weight_hooks``: the weight is its centroids, wherever it is not zero."""

    def __init__(self, array: Array, half: bool) -> None:
        values = np.unique(array)
        values = values[values != 0]
        # Index 0 is zero, which is no parameter.
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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """``artifact``, as ``share`` left it, with its centroids trained to answer as ``teacher``, the model before it was shared.

    Biases that share nothing stay as they are. Raises Unsupported if no FP32 weight is shared or the model cannot be trained, and
    as ``recover``.
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
        raise Unsupported("no FP32 weight of the model has shared values", "share the weights first")
    return found
