"""Hints: losses between tensors inside the student and the teacher. Adaptors match the channels, and are discarded after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.training.batches import TrainingBatches
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.torch import Tensor, functional, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel


class Hints:
    """The squared error divided by the teacher's variance, averaged over ``pairs`` (student tensor: teacher tensor)."""

    def __init__(
        self, model: TrainableModel, data: Dataset, teacher: Teacher, pairs: Mapping[str, str], seed: int
    ) -> None:
        """Raises InvalidArgument if a tensor is unknown, or if the tensors of a pair differ in more than the number of channels."""
        self.teacher, self.pairs = teacher, dict(pairs)
        self._adaptors: dict[str, tuple[int, Any]] = {}
        self._variances: dict[str, float] = {}
        if not pairs:
            return
        missing = sorted(set(pairs.values()) - set(teacher.answers))
        if missing:
            raise InvalidArgument(f"the teacher was made without the tensors {missing}", "name them in `also`")
        batches = TrainingBatches(model, data)
        with torch.no_grad():
            found = batches.forward(batches.inputs(np.arange(batches.unit)), list(pairs))
        generator = torch.Generator().manual_seed(seed)
        for name, target in pairs.items():
            answers = teacher.answers[target]
            axis = _channel_axis(name, found[name].shape[1:], answers.shape[1:])
            ours, theirs = found[name].shape[axis], answers.shape[axis]
            start = torch.eye(theirs) if ours == theirs else torch.randn(theirs, ours, generator=generator) / ours**0.5
            self._adaptors[name] = axis, nn.Parameter(start)
            self._variances[name] = max(float(answers.var(axis=0).mean()), 1e-12)

    @property
    def parameters(self) -> list[Any]:
        return [weight for _, weight in self._adaptors.values()]

    def __call__(self, tensors: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        answers = self.teacher(tensors, rows)
        terms = []
        for name, target in self.pairs.items():
            axis, weight = self._adaptors[name]
            adapted = functional.linear(tensors[name].movedim(axis, -1), weight).movedim(-1, axis)
            terms.append(functional.mse_loss(adapted, answers[target]) / self._variances[name])
        return torch.stack(terms).mean()


def _channel_axis(name: str, student: tuple[int, ...], teacher: tuple[int, ...]) -> int:
    """The axis of the channels: axis 1 for images, the last axis for sequences and vectors."""
    for axis in (1, len(student)) if len(student) == 3 else (len(student), 1):
        others = [size for place, size in enumerate(student, 1) if place != axis]
        if len(student) == len(teacher) and others == [s for place, s in enumerate(teacher, 1) if place != axis]:
            return axis
    raise InvalidArgument(
        f"hint '{name}' has shape {list(student)} per sample, but the teacher's tensor has {list(teacher)}",
        "pair tensors that differ only in the number of channels",
    )
