from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from networks import mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import Unsupported
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.sharing.centroid_tuning import CentroidOptions, SharedWeight, tune_centroids
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.judge.accuracy import answers, make_reference
from penstock.tensor import Array

torch.set_num_threads(1)
DATA = make_dataset({"x": np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)}, None)
OPTIONS = CentroidOptions(fit=FitOptions(epochs=10, learning_rate=2e-3))


def weights(artifact: Artifact) -> dict[str, Array]:
    graph = onnx.load_model_from_string(artifact.data).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_the_gradient_of_a_centroid_is_the_sum_of_its_members() -> None:
    rng = np.random.default_rng(1)
    array = rng.choice(np.float32([0, 0.5, -0.25, 2]), (7, 5))
    for half in (True, False):
        shared = SharedWeight(array, half)
        assert np.array_equal(shared(torch.empty(0)).detach().numpy(), array)
        gradient = rng.normal(size=array.shape).astype(np.float32)
        shared(torch.empty(0)).backward(torch.tensor(gradient))
        wanted = [gradient[array == value].sum() for value in (-0.25, 0.5, 2)]
        # FP16 keeps three digits of what is passed through the rounding.
        assert shared.centroids.grad.numpy() == pytest.approx(wanted, rel=2e-3 if half else 1e-5, abs=1e-3)


def test_it_recovers_what_sharing_lost_and_keeps_what_sharing_made() -> None:
    teacher = prune(mlp(), PruneOptions(rule=GlobalRule(sparsity=0.3)))
    shared = share(teacher, ShareOptions(fc_bits=2, bias_bits=3))
    tuned = tune_centroids(shared, teacher, DATA, OPTIONS)
    before, after = weights(shared), weights(tuned)
    for name in ("w0", "w2", "w4"):
        assert np.array_equal(before[name] == 0, after[name] == 0)
        pairs = np.unique(np.stack([before[name].ravel(), after[name].ravel()]), axis=1)
        assert pairs.shape[1] == len(np.unique(before[name]))  # each value became one value
        assert not np.array_equal(before[name], after[name])
        assert (after[name] == after[name].astype(np.float16)).all()
    engine = get_engine("onnxruntime")
    judge = make_reference(answers(engine.load(teacher, {}), DATA), None)
    errors = [judge.compare(answers(engine.load(one, {}), DATA)).relative_error for one in (shared, tuned)]
    assert errors[1] < 0.85 * errors[0]
    assert tuned.provenance[-1].name == "tune-centroids"
    assert tuned.digest == tune_centroids(shared, teacher, DATA, OPTIONS).digest


def test_a_model_that_shares_nothing() -> None:
    with pytest.raises(Unsupported, match="run penstock share"):
        tune_centroids(mlp(), mlp(), DATA, CentroidOptions(max_centroids=10))
