"""Taylor importance, compared with the derivative at gates on the channels."""

from __future__ import annotations

import numpy as np
import pytest

from networks import Network, cnn, images
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.pruning.structured.taylor import by_taylor
from penstock.offline.compress.training.torch import functional, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.tensor import Array


def _gate_derivatives(artifact: Artifact, tensor: str, x: Array, labels: Array, batch: int) -> Array:
    """The mean over batches of |dL/dg| for a gate g on each channel of ``tensor``, in shares."""
    model = TrainableModel(artifact)
    total = np.zeros(32)
    for start in range(0, len(x), batch):
        gates = torch.ones(1, 32, 1, 1, requires_grad=True)
        model.value_hooks[tensor] = gates.mul
        scores = model({"x": torch.from_numpy(x[start : start + batch])})["y"]
        functional.cross_entropy(scores, torch.from_numpy(labels[start : start + batch])).backward()
        total += gates.grad.abs().numpy().reshape(-1)
    return total / total.sum()


def test_taylor_is_the_derivative_at_the_gates() -> None:
    artifact, x = cnn(), images(20)
    labels = np.random.default_rng(0).integers(0, 10, 20)
    structure = Structure(artifact)
    inner = structure.groups[1]  # the first convolution of the residual block, which one other reads
    scores = by_taylor(structure, make_dataset({"x": x}, labels), batch_size=8)
    want = _gate_derivatives(artifact, inner.name, x, labels, 8)
    np.testing.assert_allclose(scores[inner.name], want, rtol=1e-3, atol=1e-6)  # FP32 sums in another order


@pytest.mark.parametrize("labels", [None, np.arange(12) % 10])
def test_each_group_has_scores_with_labels_or_without(labels: Array | None) -> None:
    structure = Structure(cnn())
    scores = by_taylor(structure, make_dataset({"x": images(12)}, labels))
    for group in structure.groups:
        if group.cuttable:
            assert scores[group.name].sum() == pytest.approx(1)
            assert (scores[group.name] >= 0).all()


def test_values_that_are_no_scores_have_their_squares_as_loss() -> None:
    n = Network()
    x = n.op("Relu", n.op("MatMul", "x", n.normal(4, 6)))
    n.op("MatMul", x, n.normal(6, 1), name="y")
    structure = Structure(n.artifact({"x": ["N", 4]}, {"y": ["N", 1]}))
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    (score, _) = by_taylor(structure, make_dataset({"x": x}, None)).values()
    assert score.sum() == pytest.approx(1)


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(InvalidData, match="labels go up to 10"):
        by_taylor(Structure(cnn()), make_dataset({"x": images(2)}, np.array([0, 10])))


def test_operators_that_cannot_be_trained_are_named() -> None:
    n = Network()
    x = n.op("Det", n.op("Reshape", n.op("MatMul", "x", n.normal(4, 9)), n.weight(np.array([-1, 3, 3]))))
    n.op("Identity", x, name="y")
    structure = Structure(n.artifact({"x": ["N", 4]}, {"y": ["N"]}))
    with pytest.raises(Unsupported, match="Det"):
        by_taylor(structure, make_dataset({"x": np.ones((2, 4), np.float32)}, None))
