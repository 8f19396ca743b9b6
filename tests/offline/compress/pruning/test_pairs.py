"""Pairs of layers: which are seen, and that reordering their channels changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from networks import Network, cnn, mlp
from penstock.artifact import Artifact
from penstock.offline.compress.pruning.pairs import find_pairs
from penstock.offline.optimize.model import infer_shapes, read_proto, to_bytes
from penstock.offline.optimize.verify import Verifier


def _pairs(artifact: Artifact) -> list[tuple[str, str, int]]:
    return [
        (pair.first.node.op_type, pair.second.node.op_type, pair.repeat)
        for pair in find_pairs(infer_shapes(read_proto(artifact)))
    ]


def lenet(reshape: list[int] | None = None) -> Artifact:
    """Two convolutions with pooling and two Gemm; Flatten, or Reshape to the shape given."""
    n = Network()
    x = n.op("MaxPool", n.op("Relu", n.conv("x", 1, 6)), kernel_shape=[2, 2], strides=[2, 2])
    x = n.op("AveragePool", n.op("Tanh", n.conv(x, 6, 8)), kernel_shape=[2, 2], strides=[2, 2])
    x = n.op("Flatten", x) if reshape is None else n.op("Reshape", x, n.weight(np.array(reshape, np.int64)))
    n.gemm(n.op("Relu", n.gemm(x, 32, 20)), 20, 4, name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 4]})


def feed_forward() -> Artifact:
    """MatMul, Add, the parts of GELU, MatMul, Add, over [N, 5, 8]."""
    n = Network()
    x = n.op("Add", n.normal(16), n.op("MatMul", "x", n.normal(8, 16)))
    erf = n.op("Erf", n.op("Div", x, n.weight(np.float32(2**0.5))))
    x = n.op("Mul", n.op("Mul", x, n.op("Add", erf, n.weight(np.float32(1)))), n.weight(np.float32([0.5])))
    n.op("Add", n.op("MatMul", x, n.normal(16, 8)), n.normal(8), name="y")
    return n.artifact({"x": ["N", 5, 8]}, {"y": ["N", 5, 8]})


CASES = {
    "mlp": (mlp(), [("Gemm", "Gemm", 1)] * 2),
    "residual": (cnn(), [("Conv", "Conv", 1)]),
    "flatten": (lenet(), [("Conv", "Conv", 1), ("Conv", "Gemm", 4), ("Gemm", "Gemm", 1)]),
    "reshape": (lenet([-1, 32]), [("Conv", "Conv", 1), ("Conv", "Gemm", 4), ("Gemm", "Gemm", 1)]),
    "batch taken over": (lenet([0, -1]), [("Conv", "Conv", 1), ("Conv", "Gemm", 4), ("Gemm", "Gemm", 1)]),
    "feed-forward": (feed_forward(), [("MatMul", "MatMul", 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_pairs_that_are_seen(name: str) -> None:
    artifact, wanted = CASES[name]
    assert _pairs(artifact) == wanted


@pytest.mark.parametrize("name", CASES)
def test_another_order_gives_the_same_answers(name: str) -> None:
    artifact, wanted = CASES[name]
    model = infer_shapes(read_proto(artifact))
    for number in range(len(wanted)):
        pair = find_pairs(model)[number]
        pair.select(model, np.random.default_rng(number).permutation(len(pair.first.weights())))
    data = to_bytes(model)
    assert data != artifact.data
    # Sums of up to 64 FP32 products in another order.
    assert Verifier(artifact, tolerance=1e-5).check(data).failure == ""


def _shared_weight() -> Artifact:
    n = Network()
    w = n.normal(8, 8)
    n.op("MatMul", n.op("Relu", n.op("MatMul", "x", w)), w, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})


def _read_outside() -> Artifact:
    n = Network()
    hidden = n.op("Relu", n.gemm("x", 8, 8), name="hidden")
    n.gemm(hidden, 8, 4, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 4], "hidden": ["N", 8]})


def _over_the_last_axis() -> Artifact:
    n = Network()
    n.op("MatMul", n.conv("x", 1, 8), n.normal(8, 8), name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 8, 8, 8]})


def _mixing() -> Artifact:
    n = Network()
    n.gemm(n.op("Softmax", n.gemm("x", 8, 8)), 8, 4, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 4]})


def _added_to_the_input() -> Artifact:
    n = Network()
    n.gemm(n.op("Add", n.gemm("x", 8, 8), "x"), 8, 4, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 4]})


def _scaled() -> Artifact:
    n = Network()
    x = n.op("Gemm", "x", n.normal(8, 8), n.normal(8), alpha=2.0)
    n.gemm(x, 8, 4, name="y")
    return n.artifact({"x": ["N", 8]}, {"y": ["N", 4]})


def _folded_batch() -> Artifact:
    n = Network()
    x = n.op("Reshape", n.conv("x", 1, 4), n.weight(np.array([-1, 16], np.int64)))
    n.gemm(x, 16, 4, name="y")
    return n.artifact({"x": [2, 1, 4, 4]}, {"y": [8, 4]})


def _grouped() -> Artifact:
    n = Network()
    x = n.op("Conv", n.conv("x", 1, 8), n.normal(8, 4, 3, 3), group=2)
    n.op("Conv", x, n.normal(4, 8, 1, 1), name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 4, 6, 6]})


@pytest.mark.parametrize(
    "make",
    [
        _shared_weight,
        _read_outside,
        _over_the_last_axis,
        _mixing,
        _added_to_the_input,
        _scaled,
        _folded_batch,
        _grouped,
    ],
)
def test_what_is_left_alone(make: object) -> None:
    assert _pairs(make()) == []  # type: ignore[operator]
