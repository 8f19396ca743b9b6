"""The tensors that can be rescaled; the outputs of the model stay the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import Network
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.compress.ptq.rescale import Rescaling
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.tensor import Array


def run(artifact: Artifact, x: Array) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1, "graph_level": "disabled"}).forward({"x": x})["y"]


def image_net(build: Callable[[Network], None]) -> Artifact:
    n = Network(3)
    build(n)
    rank = 2 if build in (flattened, reshaped, averaged, tokens) else 4
    return n.artifact({"x": ["N", 4, 6, 6]}, {"y": [f"y{axis}" for axis in range(rank)]})


def plain(n: Network) -> None:
    n.op("Conv", n.op("Relu", n.conv("x", 4, 8)), n.normal(3, 8, 3, 3), name="y")


def leaky(n: Network) -> None:
    n.op("Conv", n.op("LeakyRelu", n.conv("x", 4, 8), alpha=0.1), n.normal(3, 8, 1, 1), name="y")


def pooled(n: Network) -> None:
    x = n.op("MaxPool", n.op("Relu", n.conv("x", 4, 8)), kernel_shape=[2, 2], strides=[2, 2])
    n.op("Conv", n.op("AveragePool", x, kernel_shape=[2, 2]), n.normal(3, 8, 1, 1), name="y")


def depthwise(n: Network) -> None:
    x = n.op("Relu", n.conv("x", 4, 8, 1))
    x = n.op("Relu", n.op("Conv", x, n.normal(8, 1, 3, 3), n.normal(8), group=8, pads=[1] * 4))
    n.op("Conv", x, n.normal(3, 8, 1, 1), name="y")


def grouped(n: Network) -> None:
    x = n.op("Relu", n.op("Conv", "x", n.normal(8, 2, 3, 3), n.normal(8), group=2))
    n.op("Conv", x, n.normal(12, 2, 1, 1), group=4, name="y")


def transposed(n: Network) -> None:
    x = n.op("Relu", n.op("ConvTranspose", "x", n.normal(4, 3, 2, 2), n.normal(6), group=2))
    n.op("ConvTranspose", x, n.normal(6, 5, 2, 2), name="y")


def flattened(n: Network) -> None:
    x = n.op("Flatten", n.op("Relu", n.conv("x", 4, 8)))
    n.op("Gemm", x, n.normal(5, 8 * 36), transB=1, name="y")


def reshaped(n: Network) -> None:
    x = n.op("Reshape", n.op("Relu", n.conv("x", 4, 8)), n.weight(np.array([-1, 8 * 36])))
    n.op("MatMul", x, n.normal(8 * 36, 5), name="y")


def averaged(n: Network) -> None:
    x = n.op("ReduceMean", n.op("Relu", n.conv("x", 4, 8)), axes=[-1, 2], keepdims=0)
    n.gemm(x, 8, 5, name="y")


def forked(n: Network) -> None:
    x = n.op("Relu", n.conv("x", 4, 8))
    n.op("Add", n.op("Conv", x, n.normal(3, 8, 1, 1)), n.op("Conv", x, n.normal(3, 8, 1, 1)), name="y")


def normalised(n: Network) -> None:
    x = n.op("LayerNormalization", "x", n.normal(6), n.normal(6))
    q, k = (n.op("Add", n.op("MatMul", x, n.normal(6, 7)), n.normal(7)) for _ in "qk")
    n.op("Add", n.op("MatMul", q, n.normal(7, 5)), n.op("MatMul", k, n.normal(7, 5)), name="y")


def decomposed(n: Network) -> None:
    x = n.op("Add", n.op("Mul", n.op("Relu", "x"), n.normal(6)), n.normal(6))
    n.op("MatMul", x, n.normal(6, 7), name="y")


def tokens(n: Network) -> None:
    x = n.op("LayerNormalization", "x", n.normal(6), n.normal(6))
    x = n.op("Reshape", n.op("ReduceMean", x, axes=[1], keepdims=0), n.weight(np.array([-1, 6])))
    n.gemm(x, 6, 3, name="y")


def shared(n: Network) -> None:
    w = n.normal(4, 4, 1, 1)
    x = n.op("Relu", n.op("Conv", "x", w))
    n.op("Conv", n.op("Relu", n.op("Conv", x, w)), w, name="y")


LINKS = {
    plain: 1, leaky: 1, pooled: 1, depthwise: 2, grouped: 1, transposed: 1, flattened: 1, reshaped: 1, averaged: 1,
    forked: 1, normalised: 3, decomposed: 1, tokens: 1, shared: 2,
}  # fmt: skip


@pytest.mark.parametrize("build", LINKS, ids=lambda build: build.__name__)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_powers_of_two_leave_every_bit(build: Callable[[Network], None], seed: int) -> None:
    artifact, rng = image_net(build), np.random.default_rng(seed)
    rescaling = Rescaling(infer_shapes(read_proto(artifact)))
    assert len(rescaling.links) == LINKS[build]
    for link in rescaling.links:
        link.rescale(np.exp2(rng.integers(-6, 7, link.channels)))
    changed = rescaling.write()
    assert changed.digest != artifact.digest
    x = rng.standard_normal((2, 4, 6, 6)).astype(np.float32)
    assert np.array_equal(run(artifact, x), run(changed, x))


def to_addition(n: Network) -> None:
    x = n.op("Relu", n.conv("x", 4, 4))
    n.op("Add", n.op("Conv", x, n.normal(4, 4, 1, 1)), x, name="y")


def sigmoid(n: Network) -> None:
    n.op("Conv", n.op("Sigmoid", n.conv("x", 4, 8)), n.normal(3, 8, 1, 1), name="y")


def joined(n: Network) -> None:
    x = n.op("Concat", n.conv("x", 4, 4), "x", axis=1)
    n.op("Conv", x, n.normal(3, 8, 1, 1), name="y")


def as_second_operand(n: Network) -> None:
    x = n.op("MatMul", "x", n.normal(6, 6))
    n.op("MatMul", "x", x, name="y")


def image_wide_shift(n: Network) -> None:
    x = n.op("Add", n.conv("x", 4, 8), n.normal(6))
    n.op("Conv", x, n.normal(3, 8, 1, 1), name="y")


@pytest.mark.parametrize("build", [to_addition, sigmoid, joined, as_second_operand, image_wide_shift])
def test_what_cannot_be_rescaled_is_no_link(build: Callable[[Network], None]) -> None:
    assert not Rescaling(infer_shapes(read_proto(image_net(build)))).links


def test_a_clip_is_passed_but_told() -> None:
    n = Network()
    bounds = n.weight(np.float32(0)), n.weight(np.float32(6))
    n.op("Conv", n.op("Clip", n.conv("x", 4, 8), *bounds), n.normal(3, 8, 1, 1), name="y")
    (link,) = Rescaling(infer_shapes(read_proto(n.artifact({"x": ["N", 4, 6, 6]}, {"y": ["N", 3, 6, 6]})))).links
    assert [top for _, top in link.clips] == [6.0]


@pytest.mark.parametrize("bounds", [(-1, 1), (0, np.inf), (0.5, 6)])
def test_other_clips_end_a_way(bounds: tuple[float, float]) -> None:
    n = Network()
    low, high = (n.weight(np.float32(bound)) for bound in bounds)
    n.op("Conv", n.op("Clip", n.conv("x", 4, 8), low, high), n.normal(3, 8, 1, 1), name="y")
    artifact = n.artifact({"x": ["N", 4, 6, 6]}, {"y": ["N", 3, 6, 6]})
    assert not Rescaling(infer_shapes(read_proto(artifact))).links
