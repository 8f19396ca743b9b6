"""Models with embedding tables and recurrent layers, for tests of how weights are stored."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.tensor import Array


def table(rows: int = 50, width: int = 32, seed: int = 0, padding: int | None = 0) -> Array:
    """Random rows of different magnitudes; the row ``padding`` is zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, width)) * np.geomspace(0.01, 10, rows)[:, None]
    if padding is not None and rows:
        values[padding] = 0
    return values.astype(np.float32)


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int | str]]],
    outputs: dict[str, list[int | str]],
    weights: dict[str, Array],
    opset: int = 17,
) -> Artifact:
    """A model with FP32 outputs; inputs have a type and a shape."""
    graph = helper.make_graph(
        nodes,
        "stored",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return Artifact.from_bytes(proto.SerializeToString(deterministic=True))


def embedding(
    weight: Array, ids: int = TensorProto.INT64, rank: int = 2, opset: int = 17, outputs: int = 8, tied: bool = False
) -> Artifact:
    """ids, of ``rank`` axes, to the rows ``e`` of a table, and to their products ``y``; if ``tied``, with the table itself."""
    dims: list[int | str] = ["N", *(f"T{axis}" for axis in range(1, rank))][:rank]
    rng = np.random.default_rng(1)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["e"])]
    weights = {"table": weight}
    if tied:
        nodes.append(helper.make_node("Gemm", ["e", "table"], ["y"], transB=1))
    elif weight.ndim == 2:
        weights["w"] = rng.standard_normal((weight.shape[1], outputs)).astype(np.float32)
        nodes.append(helper.make_node("MatMul", ["e", "w"], ["y"]))
    found: dict[str, list[int | str]] = {"e": [*dims, *weight.shape[1:]]}
    if len(nodes) > 1:
        found["y"] = [*dims, len(weight) if tied else outputs]
    return model(nodes, {"ids": (ids, dims)}, found, weights, opset)


def recurrent(
    op_type: str = "LSTM",
    inputs: int = 20,
    hidden: int = 16,
    direction: str = "bidirectional",
    *,
    lengths: bool = False,
    states: bool = False,
    peepholes: bool = False,
    bias: bool = True,
    seed: int = 0,
    opset: int = 14,
    **attributes: object,
) -> Artifact:
    """x (time, batch, inputs), and at times ``lengths``, ``h`` and ``c``, to all outputs of one recurrent layer."""
    rng = np.random.default_rng(seed)
    gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type], 2 if direction == "bidirectional" else 1

    def weight(*shape: int) -> Array:
        scales = np.geomspace(0.2, 2, shape[1]).reshape(1, -1, *[1] * (len(shape) - 2))
        return (rng.uniform(-1, 1, (directions, *shape[1:])) * scales * hidden**-0.5).astype(np.float32)

    weights = {"W": weight(0, gates * hidden, inputs), "R": weight(0, gates * hidden, hidden)}
    given: dict[str, tuple[int, list[int | str]]] = {"x": (TensorProto.FLOAT, ["T", "N", inputs])}
    names = ["x", "W", "R", "B" if bias else "", "lengths" if lengths else ""]
    if bias:
        weights["B"] = weight(0, 2 * gates * hidden)
    if lengths:
        given["lengths"] = (TensorProto.INT32, ["N"])
    if states:
        names.append("h")
        given["h"] = (TensorProto.FLOAT, [directions, "N", hidden])
    if states and op_type == "LSTM":
        names.append("c")
        given["c"] = (TensorProto.FLOAT, [directions, "N", hidden])
    if peepholes:
        names += [""] * (7 - len(names)) + ["P"]
        weights["P"] = weight(0, 3 * hidden)
    states_shape: list[int | str] = [directions, "N", hidden]
    shapes: dict[str, list[int | str]] = {"Y": ["T", *states_shape], "Yh": states_shape}
    if op_type == "LSTM":
        shapes["Yc"] = states_shape
    node = helper.make_node(op_type, names, list(shapes), hidden_size=hidden, direction=direction, **attributes)
    return model([node], given, shapes, weights, opset)


def recurrent_inputs(artifact: Artifact, time: int, batch: int, seed: int = 1, scale: float = 1.0) -> dict[str, Array]:
    """Random inputs of ``recurrent``."""
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for value in onnx.load_model_from_string(artifact.data).graph.input:
        if value.name == "lengths":
            found["lengths"] = rng.integers(1, time + 1, batch).astype(np.int32)
            continue
        sizes = {"T": time, "N": batch}
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in value.type.tensor_type.shape.dim]
        found[value.name] = (scale * rng.standard_normal(shape)).astype(np.float32)
    return found
