"""Random chains of Gemm and MatMul in all their forms: scaled, transposed, with odd biases, sharing weights."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from networks import Network
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.tensor import Array

WIDTH = 8
ROWS = np.random.default_rng(7).standard_normal((64, WIDTH)).astype(np.float32)
SCALES = [1.0, 0.25, 0.5, 3.0, -2.0]
BIASES: list[tuple[int, ...] | None] = [None, (), (1,), (1, 1), (WIDTH,), (1, WIDTH)]


@st.composite
def chains(draw: st.DrawFn, rank: int = WIDTH) -> tuple[Artifact, Artifact]:
    """Two models of one function from x to y, both (N, 8): in odd forms that share weights, and in MatMul, Mul and Add alone.

    The weights have ``rank``. Each product is about as large as its input, so that a wrong factor shows in the result.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    odd, plain = Network(), Network()
    arrays = [
        (rng.normal(0, 1, (WIDTH, rank)) @ rng.normal(0, 1, (rank, WIDTH)) / (WIDTH * rank) ** 0.5).astype(np.float32)
        for _ in range(2)
    ]
    shared = [odd.weight(array) for array in arrays]
    x = y = "x"
    for last in (False, False, True):
        weight = draw(st.integers(0, 1))
        array = arrays[weight]
        if draw(st.booleans()):
            x, y = odd.op("MatMul", x, shared[weight]), plain.op("MatMul", y, plain.weight(array))
        else:
            attributes = {
                "alpha": draw(st.sampled_from(SCALES)),
                "beta": draw(st.sampled_from([0.0, *SCALES])),
                "transB": draw(st.integers(0, 1)),
            }
            bias = _bias(draw(st.sampled_from(BIASES)), rng)
            transposed = draw(st.booleans())
            x = odd.op("Transpose", x, perm=[1, 0]) if transposed else x
            inputs = [x, shared[weight], *([] if bias is None else [odd.weight(bias)])]
            x = odd.op("Gemm", *inputs, **attributes, **({"transA": 1} if transposed else {}))
            y = _plain_gemm(plain, y, array, bias, attributes)
        name = "y" if last else f"relu{len(odd.nodes)}"
        x, y = odd.op("Relu", x, name=name), plain.op("Relu", y, name=name)
    shapes = {"x": ["N", WIDTH]}, {"y": ["N", WIDTH]}
    return odd.artifact(*shapes), plain.artifact(*shapes)


def _bias(shape: tuple[int, ...] | None, rng: np.random.Generator) -> Array | None:
    return None if shape is None else np.asarray(np.abs(rng.normal(0, 1, shape)) + 0.5, np.float32)


def _plain_gemm(n: Network, x: str, weight: Array, bias: Array | None, attributes: dict[str, float]) -> str:
    weight = weight.T if attributes["transB"] else weight
    x = n.op("MatMul", x, n.weight(np.float32(attributes["alpha"]) * weight))
    return x if bias is None else n.op("Add", x, n.weight(np.float32(attributes["beta"]) * bias))


def run(artifact: Artifact, x: Array = ROWS) -> Array:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward({"x": x})["y"]


def error(changed: Artifact, original: Artifact) -> float:
    """The relative error on ``ROWS``; the difference where the original is zero."""
    want = run(original)
    return float(np.linalg.norm(run(changed) - want) / max(np.linalg.norm(want), 1e-3 * want.size**0.5))
