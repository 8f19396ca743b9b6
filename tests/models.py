"""Small ONNX models for tests, each with one trait that its name tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact, Format
from penstock.tensor import Array, DataType

Value = tuple[str, int, Sequence[int | str]]
"""Name, ONNX element type and shape of an input or output; a named dimension is free."""

_FP32 = TensorProto.FLOAT


def artifact(
    nodes: Sequence[tuple[str, Sequence[str], Sequence[str]]],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, np.ndarray] | None = None,
) -> Artifact:
    """A model of ``nodes`` (operator, inputs, outputs)."""
    graph = helper.make_graph(
        [helper.make_node(operator, list(into), list(out)) for operator, into, out in nodes],
        "test",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString(), Format.ONNX)


def identity(datatype: DataType) -> Artifact:
    """``y = x`` of shape (N, 2)."""
    value = (datatype.onnx, ["N", 2])
    return artifact([("Identity", ["x"], ["y"])], [("x", *value)], [("y", *value)])


def linear(rows: int = 3, columns: int = 2, seed: int = 0) -> Artifact:
    """``y = x @ w``, x (N, rows), y (N, columns), FP32; ``linear_weight`` gives w."""
    return artifact(
        [("MatMul", ["x", "w"], ["y"])],
        [("x", _FP32, ["N", rows])],
        [("y", _FP32, ["N", columns])],
        {"w": linear_weight(rows, columns, seed)},
    )


def two_linear() -> Artifact:
    """``y`` of ``linear(3, 2)``, and ``z`` of ``linear(3, 2, seed=1)``, for the same x."""
    return artifact(
        [("MatMul", ["x", "w"], ["y"]), ("MatMul", ["x", "v"], ["z"])],
        [("x", _FP32, ["N", 3])],
        [("y", _FP32, ["N", 2]), ("z", _FP32, ["N", 2])],
        {"w": linear_weight(), "v": linear_weight(seed=1)},
    )


def linear_weight(rows: int = 3, columns: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def product_with_stored_weights(per_channel: bool) -> Artifact:
    """A product with a weight that is stored as INT8: y (N, 64) = x (N, 256) @ ``stored_weight(per_channel)``."""
    quantised, scale = _stored_weight(per_channel)
    return artifact(
        [("DequantizeLinear", ["w", "scale"], ["weight"]), ("MatMul", ["x", "weight"], ["y"])],
        [("x", _FP32, ["N", 256])],
        [("y", _FP32, ["N", 64])],
        {"w": quantised, "scale": scale},
    )


def stored_weight(per_channel: bool) -> Array:
    """The weight of ``product_with_stored_weights``, of shape (256, 64)."""
    quantised, scale = _stored_weight(per_channel)
    return quantised * scale


def _stored_weight(per_channel: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    quantised = rng.integers(-127, 128, (256, 64), np.int8)
    return quantised, np.asarray(rng.uniform(0.001, 0.02, 64 if per_channel else ()), np.float32)


def product_of_bytes(weight: int) -> Artifact:
    """``y = x @ w`` in QDQ form, x (N, 64) of whole numbers from 0 to 255, y (N, 16), FP32; every element of w is ``weight``."""
    one, zero = np.float32(1), np.uint8(0)
    return artifact(
        [
            ("QuantizeLinear", ["x", "one", "zero"], ["bytes"]),
            ("DequantizeLinear", ["bytes", "one", "zero"], ["whole"]),
            ("DequantizeLinear", ["w", "one"], ["weights"]),
            ("MatMul", ["whole", "weights"], ["y"]),
        ],
        [("x", _FP32, ["N", 64])],
        [("y", _FP32, ["N", 16])],
        {"w": np.full((64, 16), weight, np.int8), "one": one, "zero": zero},
    )


def external_linear(folder: Path) -> Path:
    """The file of a ``linear`` below ``folder`` whose weights lie in a file beside it."""
    model = onnx.load_model_from_string(linear().data)
    onnx.save_model(model, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    return folder / "m.onnx"


def fixed_batch() -> Artifact:
    """``y = -x`` of shape (1, 3), nothing free."""
    return artifact([("Neg", ["x"], ["y"])], [("x", _FP32, [1, 3])], [("y", _FP32, [1, 3])])


def dynamic_image() -> Artifact:
    """The mean over height and width, both free: x (N, 2, H, W), y (N, 2, 1, 1)."""
    return artifact(
        [("GlobalAveragePool", ["x"], ["y"])], [("x", _FP32, ["N", 2, "H", "W"])], [("y", _FP32, ["N", 2, 1, 1])]
    )


def sum_and_difference() -> Artifact:
    """Two inputs (N, 2), two outputs: ``sum = a + b`` and ``difference = a - b``."""
    shape = ["N", 2]
    return artifact(
        [("Add", ["a", "b"], ["sum"]), ("Sub", ["a", "b"], ["difference"])],
        [("a", _FP32, shape), ("b", _FP32, shape)],
        [("sum", _FP32, shape), ("difference", _FP32, shape)],
    )


def input_as_output() -> Artifact:
    """``y = max(x, 0)``, and x itself as a second output."""
    shape = ["N", 2]
    return artifact([("Relu", ["x"], ["y"])], [("x", _FP32, shape)], [("y", _FP32, shape), ("x", _FP32, shape)])


def unread_input() -> Artifact:
    """``y = max(x, 0)``; no node reads the second input."""
    shape = ["N", 2]
    return artifact([("Relu", ["x"], ["y"])], [("x", _FP32, shape), ("unread", _FP32, shape)], [("y", _FP32, shape)])


def fails_on_odd_batch() -> Artifact:
    """x (N, 2) reshaped to (M, 4): loads, and fails at run time if N is odd."""
    return artifact(
        [("Reshape", ["x", "shape"], ["y"])],
        [("x", _FP32, ["N", 2])],
        [("y", _FP32, ["M", 4])],
        {"shape": np.array([-1, 4])},
    )


def embedding() -> Artifact:
    """y = rows ``ids`` (N, 1) of a table of ten rows, FP32 (N, 1, 4). Element n of row n is n."""
    return artifact(
        [("Gather", ["table", "ids"], ["y"])],
        [("ids", TensorProto.INT64, ["N", 1])],
        [("y", _FP32, ["N", 1, 4])],
        {"table": np.repeat(np.arange(10, dtype=np.float32)[:, None], 4, axis=1)},
    )


def filled() -> Artifact:
    """y = as many zeros as ``count`` (1,) says: a large number takes all memory."""
    return artifact([("ConstantOfShape", ["count"], ["y"])], [("count", TensorProto.INT64, [1])], [("y", _FP32, ["N"])])


def increment(datatype: DataType) -> Artifact:
    """``y = x + 1`` of shape (N,)."""
    return artifact(
        [("Add", ["x", "one"], ["y"])],
        [("x", datatype.onnx, ["N"])],
        [("y", datatype.onnx, ["N"])],
        {"one": np.array([1], datatype.dtype)},
    )


def unknown_operator() -> Artifact:
    """Well-formed, but of an operator that no engine has."""
    return artifact([("Frobnicate", ["x"], ["y"])], [("x", _FP32, ["N", 2])], [("y", _FP32, ["N", 2])])


def gather() -> Artifact:
    """``y = table[x]`` of 4 rows, x (N,) INT64: fails at run time for any other row."""
    return artifact(
        [("Gather", ["table", "x"], ["y"])],
        [("x", TensorProto.INT64, ["N"])],
        [("y", _FP32, ["N"])],
        {"table": np.arange(4, dtype=np.float32)},
    )


def count_to(fixed: int = 0) -> Artifact:
    """``y = x``, x (1,) INT64, found by counting up to it, or to ``fixed``: takes as long as one likes, on one core."""
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["sum", "one"], ["next"]),
        ],
        "body",
        [scalar("i", TensorProto.INT64, []), scalar("go", TensorProto.BOOL, []), scalar("sum", TensorProto.INT64, [1])],
        [scalar("go_on", TensorProto.BOOL, []), scalar("next", TensorProto.INT64, [1])],
        [numpy_helper.from_array(np.array([1]), "one")],
    )
    times = "fixed" if fixed else "times"
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["x"], ["times"]),
            helper.make_node("Loop", [times, "", "zero"], ["y"], body=body),
        ],
        "test",
        [scalar("x", TensorProto.INT64, [1])],
        [scalar("y", TensorProto.INT64, [1])],
        [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array(fixed), "fixed")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString(), Format.ONNX)


def endless_on_zeros() -> Artifact:
    """``y = x``, x (N, 2); never ends if an element of x is 0."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["x_in"], ["x_out"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("x_in", _FP32, ["N", 2])],
        [value("go_on", TensorProto.BOOL, []), value("x_out", _FP32, ["N", 2])],
    )
    nodes = [
        helper.make_node("Equal", ["x", "zero"], ["is_zero"]),
        helper.make_node("Cast", ["is_zero"], ["count"], to=_FP32),
        helper.make_node("ReduceMax", ["count"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["loops"], to=TensorProto.BOOL),
        helper.make_node("Loop", ["", "loops", "x"], ["y"], body=body),
    ]
    rows = (_FP32, ["N", 2])
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    graph = helper.make_graph(nodes, "endless", [value("x", *rows)], [value("y", *rows)], [zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString(), Format.ONNX)
