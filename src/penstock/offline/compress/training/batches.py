"""Convert samples of a data set to tensors, and run a model over them in batches of a permitted size."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from penstock.tensor import Array


class TrainingBatches:
    """The rows of ``data`` as batches for ``model``, whose batch size may be fixed."""

    def __init__(self, model: TrainableModel, data: Dataset) -> None:
        """Raises InvalidData if an input is missing, or if the number of samples is not a multiple of the model's fixed batch size."""
        missing = [name for name in model.input_names if name not in data.names]
        if missing:
            raise InvalidData(f"no data for input(s) {missing}", f"the data has {sorted(data.names)}")
        data.check_stacks("training")
        self.model = model
        self.count = data.count
        self.unit = model.fixed_rows or 1
        """The number of samples in a batch is a multiple of this number."""
        if self.count % self.unit:
            raise InvalidData(
                f"the model takes exactly {self.unit} samples at a time, but the data has {self.count}",
                f"give a multiple of {self.unit}",
            )
        self._data = data

    def arrays(self, rows: Array) -> dict[str, Array]:
        """The samples ``rows`` (int64 [n]) of every input, as a copy."""
        found = self._data.take(rows)
        return {name: found[name] for name in self.model.input_names}

    def inputs(self, rows: Array) -> dict[str, Tensor]:
        """The samples ``rows`` (int64 [n]) of every input, as tensors."""
        return self.tensors(self.arrays(rows))

    def tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copies of the inputs in memory allocated by torch, because the alignment may affect the last bits of a product."""
        return {name: tensor.clone() for name, tensor in to_tensors(arrays, self.model).items()}

    def forward(self, inputs: Mapping[str, Tensor], also: Collection[str] = ()) -> dict[str, Tensor]:
        """Inputs, outputs and the tensors in ``also``, by name. A model with a fixed batch size runs several times if necessary."""
        count = len(next(iter(inputs.values())))
        if self.model.fixed_rows in (None, count):
            return {**inputs, **self.model(inputs, also)}
        parts = [
            self.model({name: tensor[at : at + self.unit] for name, tensor in inputs.items()}, also)
            for at in range(0, count, self.unit)
        ]
        return {**inputs, **{name: _join([part[name] for part in parts], self.unit) for name in parts[0]}}

    def split(self, held_out: float, seed: int) -> tuple[Array, Array]:
        """Row numbers for training and validation, drawn at random with ``seed``. The second array is empty if ``held_out`` is 0."""
        if not held_out:
            return np.arange(self.count), np.arange(0)
        groups = self.count // self.unit
        if groups < 2:
            raise InvalidData(
                f"{self.count} sample(s) cannot be split into training and validation data",
                f"give at least {2 * self.unit}, or set held_out to 0",
            )
        rows = np.random.default_rng((seed, 0)).permutation(self.count)
        held = self.unit * min(max(1, round(groups * held_out)), groups - 1)
        return np.sort(rows[held:]), np.sort(rows[:held])

    def pieces(self, rows: Array, size: int) -> list[Array]:
        """``rows`` cut into nearly equal pieces of about ``size``."""
        groups = rows.reshape(-1, self.unit)
        count = -(-len(groups) // max(1, size // self.unit))
        return [piece.reshape(-1) for piece in np.array_split(groups, count)]


def _join(parts: list[Tensor], count: int) -> Tensor:
    """Join results of ``count`` samples each. If a model takes one sample, its results may lack a batch axis."""
    if parts[0].ndim and len(parts[0]) == count:
        return torch.cat(parts)
    if count == 1:
        return torch.stack(parts)
    raise Unsupported(
        f"an output for {count} samples has shape {list(parts[0].shape)}, so its first axis is not the number of samples",
        "export the model with a batch axis on every output",
    )
