"""Hints: the loss between tensors inside the student and inside the teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from networks import cnn, mlp
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.training.hints import Hints
from penstock.offline.compress.training.teacher import Teacher
from penstock.offline.compress.training.trainable import TrainableModel

X = np.random.default_rng(1).normal(size=(20, 16)).astype(np.float32)


@pytest.fixture
def data() -> Dataset:
    return make_dataset({"x": X}, None)


def loss(hints: Hints, model: TrainableModel) -> float:
    with torch.no_grad():
        found = model({"x": torch.from_numpy(X)}, also=list(hints.pairs))
        return float(hints(found, torch.arange(len(X))))


def test_a_student_that_is_the_teacher_loses_nothing(data: Dataset) -> None:
    model, teacher = TrainableModel(mlp()), Teacher(mlp(), data, also=["hidden"])
    hints = Hints(model, data, teacher, {"hidden": "hidden"}, 0)
    assert loss(hints, model) < 1e-9
    (adaptor,) = hints.parameters
    torch.testing.assert_close(adaptor.detach(), torch.eye(len(adaptor)))


def test_the_error_is_measured_in_the_teachers_own_spread(data: Dataset) -> None:
    model, teacher = TrainableModel(mlp()), Teacher(mlp(), data, also=["hidden"])
    hints = Hints(model, data, teacher, {"hidden": "hidden"}, 0)
    with torch.no_grad():
        hints.parameters[0].zero_()
    answers = teacher.answers["hidden"]
    assert loss(hints, model) == pytest.approx((answers**2).mean() / answers.var(axis=0).mean(), rel=1e-4)


def test_other_numbers_of_channels_are_adapted_by_a_matrix_of_the_seed(data: Dataset) -> None:
    model, teacher = TrainableModel(mlp()), Teacher(mlp(), data, also=["hidden"])
    one, same, other = (Hints(model, data, teacher, {"y": "hidden"}, seed).parameters[0] for seed in (0, 0, 1))
    assert one.shape == (teacher.answers["hidden"].shape[1], teacher.answers["y"].shape[1])
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_without_pairs_there_is_nothing_to_train(data: Dataset) -> None:
    assert Hints(TrainableModel(mlp()), data, Teacher(mlp(), data), {}, 0).parameters == []


def test_tensors_that_cannot_be_paired_are_refused(data: Dataset) -> None:
    with pytest.raises(InvalidArgument, match=r"without the tensors \['hidden'\]"):
        Hints(TrainableModel(mlp()), data, Teacher(mlp(), data), {"hidden": "hidden"}, 0)
    images = make_dataset({"x": np.random.default_rng(0).normal(size=(20, 3, 12, 12)).astype(np.float32)}, None)
    teacher = Teacher(cnn(), images, also=["stem"])
    with pytest.raises(InvalidArgument, match="hint 'y' has shape .* differ only in the number of channels"):
        Hints(TrainableModel(cnn()), images, teacher, {"y": "stem"}, 0)
