"""Small ONNX models whose inputs have a known meaning, and the meaning."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import models
from penstock.artifact import Artifact, Format
from penstock.rows.graph import read_graph
from penstock.tensor import Signature
from row_graphs import parsed, session

_FP32, _INT64 = TensorProto.FLOAT, TensorProto.INT64


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float32)


def built(
    nodes: list[onnx.NodeProto],
    inputs: list[models.Value],
    outputs: list[models.Value],
    weights: dict[str, np.ndarray] | None = None,
    domains: dict[str, int] | None = None,
) -> Artifact:
    """A model of ``nodes``, which may have attributes."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(*one) for one in (domains or {}).items())]
    return Artifact.from_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def signature_of(artifact: Artifact) -> Signature:
    """The signature by ONNX Runtime."""
    from penstock.engines.onnxruntime import OnnxRuntimeEngine  # noqa: PLC0415 - most tests need no engine

    return OnnxRuntimeEngine().load(artifact, {"threads": 1}).signature


def runs(artifact: Artifact, inputs: dict[str, np.ndarray]) -> bool:
    """True if ONNX Runtime accepts ``inputs``."""
    try:
        session(artifact.data).run(None, {name: _text(array) for name, array in inputs.items()})
    except Exception:  # noqa: BLE001 - ONNX Runtime raises many kinds
        return False
    return True


def _text(array: np.ndarray) -> np.ndarray:
    return array.astype(np.str_) if array.dtype == object else array


def text_encoder(rows: int = 50, transposed: bool = False, moves: int = 0, seed: int = 0) -> Artifact:
    """Embeds ``input_ids``, adds ``token_type_ids`` (2 rows), averages under ``attention_mask``, and projects to 4 numbers.

    Between the ids and the Gather are ``moves`` operators that only move or cast elements, chosen by ``seed``.
    """
    draw = random.Random(seed)
    nodes, name = [], "input_ids"
    for number in range(moves):
        way = draw.choice(["Identity", "Cast", "Unsqueeze", "Transpose"])
        out = f"moved_{number}"
        if way == "Cast":
            kind = draw.choice([TensorProto.INT32, TensorProto.INT64])
            nodes.append(helper.make_node(way, [name], [out], to=kind))
        elif way == "Unsqueeze":
            nodes.append(helper.make_node(way, [name, "last"], [f"{out}_wide"]))
            nodes.append(helper.make_node("Squeeze", [f"{out}_wide", "last"], [out]))
        elif way == "Transpose":
            nodes.append(helper.make_node(way, [name], [f"{out}_turned"], perm=[1, 0]))
            nodes.append(helper.make_node(way, [f"{out}_turned"], [out], perm=[1, 0]))
        else:
            nodes.append(helper.make_node(way, [name], [out]))
        name = out
    table = "words"
    if transposed:
        nodes.append(helper.make_node("Transpose", ["words"], ["turned"], perm=[1, 0]))
        table = "turned"
    nodes += [
        helper.make_node("Gather", [table, name], ["word"]),
        helper.make_node("Gather", ["kinds", "token_type_ids"], ["kind"]),
        helper.make_node("Add", ["word", "kind"], ["sum"]),
        helper.make_node("Cast", ["attention_mask"], ["float_mask"], to=_FP32),
        helper.make_node("Unsqueeze", ["float_mask", "last"], ["wide_mask"]),
        helper.make_node("Mul", ["sum", "wide_mask"], ["kept"]),
        helper.make_node("ReduceMean", ["kept"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "project"], ["y"]),
    ]
    shape = ["batch", "sequence"]
    words = weight(rows, 8)
    return built(
        nodes,
        [(name, _INT64, shape) for name in ("input_ids", "token_type_ids", "attention_mask")],
        [("y", _FP32, ["batch", 4])],
        {
            "words": words.T.copy() if transposed else words,
            "kinds": weight(2, 8, seed=1),
            "project": weight(8, 4, seed=2),
            "last": np.array([-1], np.int64),
        },
    )


def image_net(channels: int = 3, last: bool = False, normalised: bool = False, size: int | str = "size") -> Artifact:
    """A convolution, pooling and a product. ``last``: the channels are the last axis. ``normalised``: the graph divides by 255."""
    nodes, name = [], "x"
    if normalised:
        nodes.append(helper.make_node("Div", [name, "full"], ["scaled"]))
        name = "scaled"
    if last:
        nodes.append(helper.make_node("Transpose", [name], ["first"], perm=[0, 3, 1, 2]))
        name = "first"
    nodes += [
        helper.make_node("Conv", [name, "kernel"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "dense"], ["y"]),
    ]
    shape = ["N", size, size, channels] if last else ["N", channels, size, size]
    weights = {"kernel": weight(8, channels, 3, 3), "dense": weight(8, 5), "full": np.float32(255)}
    return built(nodes, [("x", _FP32, shape)], [("y", _FP32, ["N", 5])], weights if normalised else _without(weights))


def _without(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in weights.items() if name != "full"}


def voice_activity() -> Artifact:
    """Audio [N, 512], a state [2, N, 8] that is returned as ``stateN``, and a scalar ``sr`` that must be 8000 or 16000."""
    body = """
        low = Constant <value_int = 8000> ()
        is_low = Equal (sr, low)
        wide = Unsqueeze (input, one)
        heard = Conv <strides = [256]> (wide, kernel)
        mean = ReduceMean <axes = [2], keepdims = 0> (heard)
        chosen = If (is_low) <
            then_branch = a () => (p) { p = Neg (mean) },
            else_branch = b () => (q) { q = Identity (mean) }
        >
        stateN = Add (state, chosen)
        last = ReduceSum <keepdims = 0> (stateN, axes)
        output = Sigmoid (last)
    """
    kernel = numpy_helper.from_array(weight(8, 1, 256), "kernel")
    artifact = parsed(
        body,
        "float[N, 512] input, float[2, N, 8] state, int64 sr",
        "float[N] output, float[2, N, 8] stateN",
        "int64[1] one = {1}, int64[2] axes = {0, 2}",
    )
    model = onnx.load_model_from_string(artifact.data)
    model.graph.initializer.append(kernel)
    return Artifact.from_bytes(model.SerializeToString(), Format.ONNX)


def scaled_table() -> Artifact:
    """A Scaler of three columns with means 10, 0 and -500, then a linear regressor."""
    nodes = [
        helper.make_node(
            "Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[10.0, 0.0, -500.0], scale=[1.0, 0.5, 0.01]
        ),
        helper.make_node(
            "LinearRegressor", ["s"], ["y"], domain="ai.onnx.ml", coefficients=[1.0, 2.0, 3.0], intercepts=[0.0]
        ),
    ]
    return built(nodes, [("x", _FP32, ["N", 3])], [("y", _FP32, ["N", 1])], domains={"ai.onnx.ml": 3})


def categories() -> Artifact:
    """A one-hot code of the text column ``colour``, which is red, green or blue."""
    node = helper.make_node(
        "OneHotEncoder", ["colour"], ["y"], domain="ai.onnx.ml", cats_strings=["red", "green", "blue"], zeros=0
    )
    return built(
        [node],
        [("colour", TensorProto.STRING, ["N", 1])],
        [("y", _FP32, ["N", 1, 3])],
        domains={"ai.onnx.ml": 3},
    )


def stumps(thresholds: list[float]) -> Artifact:
    """The number of ``thresholds`` that are not below the only column of ``x``, as a sum of trees."""
    count = len(thresholds)
    nodes = {
        "featureids": [0] * 3 * count,
        "modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * count,
        "values": [value for threshold in thresholds for value in (threshold, 0.0, 0.0)],
        "treeids": [tree for tree in range(count) for _ in range(3)],
        "nodeids": [0, 1, 2] * count,
        "truenodeids": [1, 0, 0] * count,
        "falsenodeids": [2, 0, 0] * count,
    }
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        target_treeids=list(range(count)),
        target_nodeids=[1] * count,
        target_ids=[0] * count,
        target_weights=[1.0] * count,
        **{f"nodes_{name}": values for name, values in nodes.items()},
    )
    return built([node], [("x", _FP32, ["N", 1])], [("y", _FP32, ["N", 1])], domains={"ai.onnx.ml": 3})


def graph_of(artifact: Artifact):
    return read_graph(artifact.data)
