"""Trains the small networks with Penstock's own training of ONNX graphs, and caches them. The same code and seed give the same
file.

``python -m benchmarks.compression.train`` trains all networks and prints their accuracies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.compression import data, nets
from benchmarks.compression.data import Split
from penstock.artifact import Artifact, sha256
from penstock.dataset import Dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.training.fit import FitOptions, Loss, fit
from penstock.offline.compress.training.torch import Tensor, functional, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.accuracy import answers, make_reference

CACHE = Path(__file__).parents[1] / ".cache"


class Task(NamedTuple):
    """A network, its data, and its training options."""

    make: Callable[[], Artifact]
    data: Callable[[], Split]
    options: FitOptions


TASKS: dict[str, Task] = {
    "plain": Task(nets.plain, data.digits, FitOptions(epochs=25, learning_rate=3e-3)),
    "depthwise": Task(nets.depthwise, data.digits, FitOptions(epochs=40, learning_rate=3e-3)),
    "deep": Task(nets.deep, data.digits, FitOptions(epochs=30, learning_rate=3e-3)),
    "residual": Task(nets.residual, data.digits, FitOptions(epochs=25, learning_rate=2e-3)),
    "MLP": Task(nets.mlp, data.digits, FitOptions(epochs=40, learning_rate=3e-3)),
    "encoder": Task(nets.encoder, data.texts, FitOptions(epochs=10, learning_rate=2e-3, weight_decay=0.1)),
    "autoencoder": Task(nets.autoencoder, data.patterns, FitOptions(epochs=80, learning_rate=3e-3)),
    "LeNet-300-100": Task(nets.lenet_300_100, data.digits28, FitOptions(epochs=30, learning_rate=1e-3)),
    "LeNet-5": Task(nets.lenet_5, data.digits28, FitOptions(epochs=15, learning_rate=1e-3)),
}


def trained(name: str) -> Artifact:
    """The network ``name``, from the cache or trained now. The depthwise network has outliers in its channels."""
    task = TASKS[name]
    model, split = task.make(), task.data()
    key = sha256(f"{model.digest} {split.train.digest} {task.options} {Path(__file__).read_bytes()!r}".encode())
    path = CACHE / f"{name.lower()}-{key[:16]}.onnx"
    if not path.exists():
        made = train(model, split.train, task.options)
        CACHE.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(made.data)
        partial.replace(path)
    found = Artifact.from_bytes(path.read_bytes())
    return nets.with_outliers(found) if name == "depthwise" else found


def train(model: Artifact, samples: Dataset, options: FitOptions) -> Artifact:
    """``model`` trained on ``samples``: on their labels, or to reproduce its input if there are no labels."""
    network = TrainableModel(model)
    fit(network, samples, make_loss(samples), options)
    return network.to_artifact("train", {}, {})


def make_loss(samples: Dataset) -> Loss:
    """The loss: cross-entropy with smoothed labels, or the squared error to the input if there are no labels."""
    if samples.labels is None:
        wanted = torch.from_numpy(samples.inputs["input"])
        return lambda tensors, rows: functional.mse_loss(tensors["output"], wanted[rows])
    labels = torch.from_numpy(samples.labels)

    def loss(tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return functional.cross_entropy(tensors["output"], labels[rows], label_smoothing=0.05)

    return loss


def accuracy(model: Artifact, samples: Dataset) -> float:
    """The fraction of correct labels; 1 if there are no labels, because other models are then compared with this model's outputs."""
    found = answers(get_engine("onnxruntime").load(model, {"threads": 1}), samples)
    return make_reference(found, samples.labels).original().value


def main() -> None:
    """Train the networks that are not in the cache, and print the accuracies."""
    for name, task in TASKS.items():
        start = time.monotonic()
        model, split = trained(name), task.data()
        scores = f"train {accuracy(model, split.train):.2%}, test {accuracy(model, split.test):.2%}"
        print(f"{name:14s} {scores}, {model.size_bytes:,d} bytes, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
