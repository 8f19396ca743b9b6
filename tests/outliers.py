"""Networks whose channels have very uneven ranges, the function being that of the even network."""

from __future__ import annotations

import numpy as np

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")


def depthwise(outlier: float = 1.0, blocks: int = 2, channels: int = 16, activation: str = "Relu") -> Artifact:
    """x (N, 1, 8, 8) to y (N, 10): stem, then depthwise and pointwise convolutions; a tenth of each tensor's channels is
    ``outlier`` times as large as it needs to be.
    """
    rng = np.random.default_rng(0)
    shapes = [(channels, 1, 3, 3), *[(channels, 1, 3, 3), (channels, channels, 1, 1)] * blocks]
    weights = [rng.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape) for shape in shapes]
    biases = [rng.normal(0, 0.1, channels) for _ in shapes]
    for at in range(len(weights) - 1):
        s = np.ones(channels)
        s[rng.choice(channels, max(1, channels // 10), replace=False)] = outlier
        weights[at] *= s[:, None, None, None]
        biases[at] *= s
        reader = weights[at + 1]
        reader /= s[:, None, None, None] if reader.shape[1] == 1 else s[None, :, None, None]
    n = Network(1)
    x = "x"
    for at, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        group = channels if at and weight.shape[1] == 1 else 1
        operands = [n.weight(array.astype(np.float32)) for array in (weight, bias)]
        x = n.op("Conv", x, *operands, group=group, pads=[weight.shape[-1] // 2] * 4)
        bounds = [n.weight(np.float32(0)), n.weight(np.float32(6))] if activation == "Clip" else []
        x = n.op(activation, x, *bounds)
    n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), channels, 10, name="y")
    return n.artifact({"x": ["N", 1, 8, 8]}, {"y": ["N", 10]})


def images(count: int, seed: int = 0) -> Dataset:
    return make_dataset({"x": np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)}, None)


def attention(outlier: float = 1.0, decomposed: bool = False, width: int = 32) -> Artifact:
    """x (N, 5, width) to y (N, 5, width): LayerNormalization with outlier channels, queries, keys and values, no softmax."""
    rng = np.random.default_rng(0)
    n = Network(1)
    s = np.ones(width)
    s[[3, 17]] = outlier
    gamma, beta = (
        n.weight((array * s).astype(np.float32)) for array in (rng.normal(1, 0.1, width), rng.normal(0, 0.1, width))
    )
    if decomposed:
        centred = n.op("Sub", "x", n.op("ReduceMean", "x", axes=[-1]))
        deviation = n.op("Sqrt", n.op("ReduceMean", n.op("Mul", centred, centred), axes=[-1]))
        x = n.op("Add", n.op("Mul", n.op("Div", centred, deviation), gamma), beta)
    else:
        x = n.op("LayerNormalization", "x", gamma, beta, axis=-1, epsilon=1e-9)
    q, k, v = (
        n.op("MatMul", x, n.weight((rng.normal(0, width**-0.5, (width, width)) / s[:, None]).astype(np.float32)))
        for _ in "qkv"
    )
    n.op("MatMul", n.op("MatMul", q, n.op("Transpose", k, perm=[0, 2, 1])), v, name="y")
    return n.artifact({"x": ["N", 5, width]}, {"y": ["N", 5, width]})


def tokens(count: int, width: int = 32, seed: int = 0) -> Dataset:
    return make_dataset({"x": np.random.default_rng(seed).standard_normal((count, 5, width)).astype(np.float32)}, None)


def run(artifact: Artifact, data: Dataset, level: str = "all") -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1, "graph_level": level}).forward(data.inputs)["y"]


def int8(artifact: Artifact, data: Dataset, method: RangeMethod = RangeMethod.MIN_MAX) -> Artifact:
    return quantize(artifact, ranges(collect(artifact, data.inputs), method, SCHEME), SCHEME)


def error(changed: Artifact, original: Artifact, data: Dataset) -> float:
    want = run(original, data)
    return float(np.linalg.norm(run(changed, data) - want) / np.linalg.norm(want))
