"""Small models whose calls are not merely rows: a scalar, a state with the batch on axis 1, texts of any length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

import networks
from penstock.artifact import Artifact

HIDDEN = 16
VOCABULARY = 50
Value = tuple[str, int, Sequence[int | str]]


def _artifact(n: networks.Network, inputs: Sequence[Value], outputs: Sequence[Value]) -> Artifact:
    infos = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    graph = helper.make_graph(n.nodes, "calls", *infos, n.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return Artifact.from_bytes(model.SerializeToString())


def voice(filters: int = 16) -> Artifact:
    """Voice activity: sound (N, S), state (2, N, 16), rate () to speech (N, 1), next (2, N, 16). An LSTM cell after convolutions."""
    n = networks.Network()
    is_wide = n.op("Equal", "rate", n.weight(np.array(16000)))
    x = n.op("Mul", "sound", n.op("Where", is_wide, n.weight(np.float32(1)), n.weight(np.float32(2))))
    x = n.op("Unsqueeze", x, n.weight(np.array([1])))
    x = n.op("Relu", n.op("Conv", x, n.normal(filters, 1, 8, fan_in=8), strides=[4]))
    x = n.op("Relu", n.op("Conv", x, n.normal(filters, filters, 3, fan_in=3 * filters), pads=[1, 1]))
    x = n.op("ReduceMean", x, axes=[2], keepdims=0)
    x = n.op("Unsqueeze", n.gemm(x, filters, HIDDEN), n.weight(np.array([0])))
    n.nodes.append(helper.make_node("Split", ["state"], ["h", "c"], axis=0))
    weights = [n.normal(1, 4 * HIDDEN, HIDDEN, fan_in=HIDDEN) for _ in range(2)]
    inputs = [x, *weights, "", "", "h", "c"]
    n.nodes.append(helper.make_node("LSTM", inputs, ["", "h1", "c1"], hidden_size=HIDDEN))
    n.op("Concat", "h1", "c1", name="next", axis=0)
    n.op("Sigmoid", n.gemm(n.op("Squeeze", "h1", n.weight(np.array([0]))), HIDDEN, 1), name="speech")
    float32 = TensorProto.FLOAT
    state = (float32, [2, "N", HIDDEN])
    return _artifact(
        n,
        [("sound", float32, ["N", "S"]), ("state", *state), ("rate", TensorProto.INT64, [])],
        [("speech", float32, ["N", 1]), ("next", *state)],
    )


def voice_calls(count: int, lengths: Sequence[int] = (256,), seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Calls of ``voice``, with sounds of the given lengths in turn."""
    rng = np.random.default_rng(seed)
    return [
        {
            "sound": rng.standard_normal((1, lengths[number % len(lengths)])).astype(np.float32),
            "state": 0.1 * rng.standard_normal((2, 1, HIDDEN)).astype(np.float32),
            "rate": np.array((8000, 16000)[number % 2]),
        }
        for number in range(count)
    ]


def text(width: int = 32, per_token: bool = False) -> Artifact:
    """ids, mask (N, L) to logits (N, 4), or with ``per_token`` to logits (N, L, 4)."""
    n = networks.Network()
    table = n.normal(VOCABULARY, width)
    real = n.op("Unsqueeze", n.op("Cast", "mask", to=TensorProto.FLOAT), n.weight(np.array([2])))
    x = n.op("Mul", n.op("Gather", table, "ids"), real)
    x = n.op("Relu", n.op("MatMul", x, n.normal(width, width, fan_in=width)))
    x = n.op("Tanh", n.op("MatMul", x, n.normal(width, width, fan_in=width)))
    if per_token:
        n.op("MatMul", x, n.normal(width, 4, fan_in=width), name="logits")
    else:
        axis = n.weight(np.array([1]))
        x = n.op(
            "Div", n.op("ReduceSum", n.op("Mul", x, real), axis, keepdims=0), n.op("ReduceSum", real, axis, keepdims=0)
        )
        n.op("MatMul", x, n.normal(width, 4, fan_in=width), name="logits")
    shape = ["N", "L", 4] if per_token else ["N", 4]
    ids = (TensorProto.INT64, ["N", "L"])
    return _artifact(n, [("ids", *ids), ("mask", *ids)], [("logits", TensorProto.FLOAT, shape)])


def texts(lengths: Sequence[int], seed: int = 0) -> list[dict[str, np.ndarray]]:
    """One row of ids and its mask for each length."""
    rng = np.random.default_rng(seed)
    return [
        {"ids": rng.integers(0, VOCABULARY, (1, length)), "mask": np.ones((1, length), np.int64)} for length in lengths
    ]
