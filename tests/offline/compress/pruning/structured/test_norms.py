"""Recomputed statistics, compared with the statistics of the tensors in torch."""

from __future__ import annotations

import numpy as np
import pytest

from networks import cnn, images
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData
from penstock.offline.compress.pruning.structured.norms import refresh_norms
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors
from prunable_networks import Images


def _normed(seed: int = 0) -> tuple[Artifact, Dataset]:
    network = Images(seed)
    network.conv()
    network.norm()
    network.residual()
    network.norm()
    x = np.random.default_rng(1).standard_normal((12, 3, 8, 8)).astype(np.float32)
    return network.classify("pool"), make_dataset({"x": x}, None)


def test_each_norm_sees_what_those_before_it_make_now() -> None:
    artifact, data = _normed()
    got = refresh_norms(artifact, data)
    assert got.provenance[-1].facts == {"norms": 2, "samples": 12}
    model = TrainableModel(got)
    norms = [node for node, *_ in model._program.steps if node.op_type == "BatchNormalization"]
    fed = [
        model(to_tensors(data.rows(at, at + 2), model), [node.inputs[0] for node in norms])  # its fixed batch is 2
        for at in range(0, 12, 2)
    ]
    for node in norms:
        seen = torch.cat([part[node.inputs[0]] for part in fed]).detach().double().numpy()
        mean, variance = (model.constant(name).numpy() for name in node.inputs[3:5])
        # FP32 in two engines, and statistics rounded to FP32.
        np.testing.assert_allclose(mean, seen.mean(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(variance, seen.var(axis=(0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_outputs_of_a_norm_have_mean_bias_and_variance_of_scale() -> None:
    network = Images(2)
    network.conv()
    network.norm()
    norm = network.x
    network.op("Identity", norm, name="y")
    artifact = network.artifact({"x": ["N", 3, 8, 8]}, {"y": ["N", network.channels, 8, 8]})
    data = make_dataset({"x": np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype(np.float32)}, None)
    loaded = get_engine("onnxruntime").load(refresh_norms(artifact, data, batch_size=7), {"threads": 1})
    y = loaded.forward(data.inputs)["y"].astype(np.float64)
    model = TrainableModel(artifact)
    (node,) = (node for node, *_ in model._program.steps if node.op_type == "BatchNormalization")
    scale, bias = (model.weights[name].detach().numpy() for name in node.inputs[1:3])
    # epsilon, 1e-5, is added to the variance, and the data go through FP32.
    np.testing.assert_allclose(y.mean(axis=(0, 2, 3)), bias, atol=1e-4)
    np.testing.assert_allclose(y.std(axis=(0, 2, 3)), np.abs(scale), rtol=2e-3)


def test_a_model_without_norms_comes_back() -> None:
    artifact = cnn()
    assert refresh_norms(artifact, make_dataset({"x": images(2)}, None)) is artifact


def test_data_that_do_not_fit_are_refused() -> None:
    artifact, _ = _normed()
    with pytest.raises(InvalidData):
        refresh_norms(artifact, make_dataset({"x": images(2)[:, :1]}, None))
