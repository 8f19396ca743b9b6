"""The ladder's first rung is the same network in torch, and what a model loses is told with its interval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.compression import data, losses
from benchmarks.compression.eager import NETWORKS, eager
from benchmarks.compression.ladder import LARGE, SMALL
from benchmarks.compression.train import TASKS
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.training.torch import torch


@pytest.mark.parametrize("name", [*LARGE, *SMALL])
def test_the_torch_module_computes_what_the_onnx_file_does(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    if name in LARGE:
        make, shape = LARGE[name]
        artifact, x = Artifact.from_file(make(tmp_path / "model.onnx")), rng.standard_normal((2, *shape), np.float32)
    else:
        artifact, x = TASKS[name].make(), TASKS[name].data().test.inputs["input"][:20]
    wanted = get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"input": x})["output"]
    with torch.inference_mode():
        found = eager(name, artifact)(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


def test_every_network_of_the_ladder_is_a_torch_module() -> None:
    assert set(NETWORKS) == {*LARGE, *SMALL}


def test_a_loss_is_of_paired_samples() -> None:
    test = data.digits().test
    model, other = TASKS["MLP"].make(), TASKS["plain"].make()
    assert losses.loss(model, model, test).value == 0
    assert 0.001 < losses.loss(model, model, test).high < 0.01
    found = losses.loss(model, other, test)
    assert found.value == pytest.approx(losses.score(model, test) - losses.score(other, test))
    assert found.low < found.value < found.high


def test_a_loss_without_labels_is_of_what_is_given_back() -> None:
    test = data.patterns().test
    model = TASKS["autoencoder"].make()
    assert losses.loss(model, model, test).value == 0
    assert (losses.scores(model, make_dataset(test.rows(0, 5), None)) >= 0).all()
