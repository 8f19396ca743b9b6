from __future__ import annotations

import numpy as np
import pytest

import networks
from penstock.dataset import make_dataset
from penstock.errors import ResourceExhausted
from penstock.offline.compress.training.memory import check_training, training_bytes


def test_weights_and_results_are_counted() -> None:
    model = networks.mlp(64)
    weights = 4 * (16 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4)
    a_sample = 4 * (4 * 64 + 4)  # two products with their ReLUs, and the answers
    data = make_dataset({"x": np.zeros((8, 16), np.float32)}, None)
    assert training_bytes(model, data, 1) == 6 * weights + 2 * a_sample
    assert training_bytes(model, data, 32) == 6 * weights + 2 * 32 * a_sample


def test_a_fixed_batch_is_run_as_often_as_it_takes() -> None:
    data = make_dataset({"x": networks.images(8)}, None)
    free = training_bytes(networks.cnn(batch="N"), data, 32)
    assert training_bytes(networks.cnn(batch=4), data, 32) == free


def test_what_does_not_fit_is_refused_before() -> None:
    model, data = networks.cnn(), make_dataset({"x": networks.images(8)}, None)
    needed = training_bytes(model, data, 32)
    check_training(model, data, 32, needed)
    check_training(model, data, 32, 0)
    with pytest.raises(ResourceExhausted, match="GiB of memory") as caught:
        check_training(model, data, 32, needed - 1)
    assert "smaller samples" in caught.value.hint
