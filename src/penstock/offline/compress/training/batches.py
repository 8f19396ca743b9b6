"""The samples of a data set as tensors, and a model run over them in the batches that it takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.tensor import Array


class TrainingBatches:
    """Rows of ``data`` for ``model``, whose first axes may be fixed to some number of samples."""

    def __init__(self, model: TrainableModel, data: Dataset) -> None:
        """Raises InvalidData if the data lack an input, or are no multiple of the model's fixed batch."""
        missing = [name for name in model.input_names if name not in data.inputs]
        if missing:
            raise InvalidData(f"no data for input(s) {missing}", f"the data has {sorted(data.inputs)}")
        self.model = model
        self.count = data.count
        self.fixed = model.fixed_rows or 0
        """Samples that the model takes at a time; 0 where it takes any number."""
        if self.count % max(1, self.fixed):
            raise InvalidData(
                f"the model takes exactly {self.fixed} samples at a time, but the data has {self.count}",
                f"give a multiple of {self.fixed}",
            )
        self._arrays = {name: data.inputs[name] for name in model.input_names}

    def arrays(self, rows: Array) -> dict[str, Array]:
        """The samples ``rows`` (int64 [n]) of every input, copied."""
        return {name: array[rows] for name, array in self._arrays.items()}

    def inputs(self, rows: Array) -> dict[str, Tensor]:
        """The samples ``rows`` (int64 [n]) of every input."""
        return self.tensors(self.arrays(rows))

    def tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Inputs in torch's own memory, whose alignment the bits of a product may depend on."""
        return {name: tensor.clone() for name, tensor in to_tensors(arrays, self.model).items()}

    def forward(self, inputs: Mapping[str, Tensor], also: Collection[str] = ()) -> dict[str, Tensor]:
        """Inputs, outputs and the tensors in ``also`` by name. A model of fixed batch is run as often as it takes."""
        count = len(next(iter(inputs.values())))
        if not self.fixed or count == self.fixed:
            return {**inputs, **self.model(inputs, also)}
        parts = [
            self.model({name: tensor[at : at + self.fixed] for name, tensor in inputs.items()}, also)
            for at in range(0, count, self.fixed)
        ]
        return {**inputs, **{name: _join([part[name] for part in parts], self.fixed) for name in parts[0]}}

    def split(self, held_out: float, seed: int) -> tuple[Array, Array]:
        """Row numbers to train on and to validate on, drawn by ``seed``; none of the second where ``held_out`` is 0."""
        rows = np.random.default_rng((seed, 0)).permutation(self.count) if held_out else np.arange(self.count)
        unit = max(1, self.fixed)
        groups = self.count // unit
        if held_out and groups < 2:
            raise InvalidData(
                f"{self.count} sample(s) cannot be split into training and validation data",
                f"give at least {2 * unit}, or hold none out",
            )
        held = unit * min(max(1, round(groups * held_out)), groups - 1) if held_out else 0
        return np.sort(rows[held:]), np.sort(rows[:held])

    def pieces(self, rows: Array, size: int) -> list[Array]:
        """``rows`` cut into equal pieces of about ``size``, each a multiple of the fixed batch."""
        unit = max(1, self.fixed)
        groups = rows.reshape(-1, unit)
        count = -(-len(groups) // max(1, size // unit))
        return [piece.reshape(-1) for piece in np.array_split(groups, count)]


def _join(parts: list[Tensor], count: int) -> Tensor:
    """Results of ``count`` samples each as one tensor; a model for one sample may answer without an axis for it."""
    if parts[0].ndim and len(parts[0]) == count:
        return torch.cat(parts)
    if count == 1:
        return torch.stack(parts)
    raise Unsupported(
        f"a result has shape {list(parts[0].shape)} for {count} samples: its first axis does not count them",
        "export the model with a batch axis on every output",
    )
