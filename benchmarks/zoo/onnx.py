"""ONNX: models of old opsets, with operators that changed since, and models with the faults of known exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.zoo.model import ZooModel
from penstock.tensor import Array

_FLOAT = TensorProto.FLOAT
_IMAGE = ("N", 3, 6, 8)


def value(name: str, shape: Sequence[int | str] | None, kind: int = _FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    opset: int,
    *,
    shape: Sequence[int | str] = _IMAGE,
    outputs: Mapping[str, Sequence[int | str]] | None = None,
    weights: Mapping[str, Array] | None = None,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model with the input ``x``. By default, its output is ``y``, of the rank of ``x``."""
    outputs = outputs or {"y": [f"y{axis}" for axis in range(len(shape))]}
    graph = helper.make_graph(
        list(nodes),
        "zoo",
        [value("x", shape)],
        [value(name, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in {"": opset, **(domains or {})}.items()]
    made = helper.make_model(graph, opset_imports=imports, producer_name="zoo")
    made.ir_version = 4 if opset < 11 else 8
    return made


def _floats(*numbers: float) -> Array:
    return np.array(numbers, np.float32)


def _weights(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(0, 0.5, shape).astype(np.float32)


def upsample_7() -> onnx.ModelProto:
    """A decoder with bilinear and nearest Upsample, as torch wrote it in 2018."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Upsample", ["a"], ["b"], "bilinear", mode="linear", scales=[1.0, 1.0, 2.0, 2.0]),
        helper.make_node("Upsample", ["b"], ["y"], "nearest", mode="nearest", scales=[1.0, 1.0, 2.0, 1.0]),
    ]
    return model(nodes, 7, weights={"w": _weights(4, 3, 3, 3)})


def upsample_8() -> onnx.ModelProto:
    return model([helper.make_node("Upsample", ["x"], ["y"], mode="linear", scales=[1.0, 1.0, 3.0, 2.0])], 8)


def upsample_9() -> onnx.ModelProto:
    return model(
        [helper.make_node("Upsample", ["x", "s"], ["y"], mode="linear")], 9, weights={"s": _floats(1, 1, 2, 2.5)}
    )


def resize_10() -> onnx.ModelProto:
    """Resize that enlarges one axis and shrinks another."""
    return model(
        [helper.make_node("Resize", ["x", "s"], ["y"], mode="nearest")], 10, weights={"s": _floats(1, 1, 2, 0.4)}
    )


def softmax_11() -> onnx.ModelProto:
    """Softmax, LogSoftmax and Hardmax over all axes from one on."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], "soft", axis=1),
        helper.make_node("LogSoftmax", ["x"], ["b"], "log", axis=2),
        helper.make_node("Hardmax", ["x"], ["c"], "hard", axis=1),
        helper.make_node("Sum", ["a", "b", "c"], ["y"], "sum"),
    ]
    return model(nodes, 11)


def group_norm_18() -> onnx.ModelProto:
    nodes = [helper.make_node("GroupNormalization", ["x", "scale", "bias"], ["y"], "norm", num_groups=2)]
    return model(nodes, 18, shape=("N", 4, 5, 6), weights={"scale": _floats(1, 2), "bias": _floats(0.5, -1)})


def attributes_7() -> onnx.ModelProto:
    """Operators whose attributes became inputs."""
    nodes = [
        helper.make_node("Pad", ["x"], ["a"], pads=[0, 0, 1, 1, 0, 0, 1, 1], value=0.5),
        helper.make_node("Slice", ["a"], ["b"], axes=[2, 3], starts=[1, 0], ends=[7, 9]),
        helper.make_node("Clip", ["b"], ["c"], min=-1.0, max=1.0),
        helper.make_node("Unsqueeze", ["c"], ["d"], axes=[1]),
        helper.make_node("Squeeze", ["d"], ["e"], axes=[1]),
        helper.make_node("Split", ["e"], ["f", "g"], axis=3, split=[4, 5]),
        helper.make_node("ReduceMean", ["f"], ["h"], axes=[3], keepdims=1),
        helper.make_node("Dropout", ["g"], ["i"], ratio=0.4),
        helper.make_node("Mul", ["h", "i"], ["y"]),
    ]
    return model(nodes, 7)


def branches_9() -> onnx.ModelProto:
    """If with old operators in its graphs."""
    bodies = [
        helper.make_graph(
            [
                helper.make_node("Upsample", ["x", "s"], [f"{name}_up"], mode="linear"),
                helper.make_node(op_type, [f"{name}_up"], [f"{name}_y"], **attributes),
            ],
            name,
            [],
            [value(f"{name}_y", ["a", "b", "c", "d"])],
        )
        for name, op_type, attributes in (("then", "Softmax", {"axis": 1}), ("else", "Clip", {"min": 0.0}))
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["y"], "if", then_branch=bodies[0], else_branch=bodies[1]),
    ]
    return model(nodes, 9, weights={"zero": np.array(0, np.float32), "s": _floats(1, 1, 2, 2)})


def function_17() -> onnx.ModelProto:
    """A local function, which ``onnx.version_converter`` loses."""
    body = [helper.make_node("Sigmoid", ["a"], ["s"]), helper.make_node("Mul", ["a", "s"], ["b"])]
    function = helper.make_function("local", "Swish", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    made = model([helper.make_node("Swish", ["x"], ["y"], "swish", domain="local")], 17, domains={"local": 1})
    made.functions.append(function)
    return made


def machine_learning() -> onnx.ModelProto:
    """ONNX-ML of an old opset: a scaler and a linear classifier."""
    nodes = [
        helper.make_node("Scaler", ["x"], ["a"], domain="ai.onnx.ml", offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0]),
        helper.make_node(
            "LinearRegressor",
            ["a"],
            ["b"],
            domain="ai.onnx.ml",
            coefficients=[0.5, -1.0, 2.0, 1.0, 0.3, -0.2],
            intercepts=[0.1, 0.2],
            targets=2,
        ),
        helper.make_node("Softmax", ["b"], ["y"], axis=1),
    ]
    return model(nodes, 9, shape=("N", 3), domains={"ai.onnx.ml": 1})


def lstm_7() -> onnx.ModelProto:
    nodes = [
        helper.make_node(
            "LSTM", ["x", "w", "r", "b"], ["states", "y"], "lstm", hidden_size=4, direction="bidirectional"
        ),
    ]
    weights = {"w": _weights(2, 16, 3), "r": _weights(2, 16, 4), "b": _weights(2, 32)}
    return model(nodes, 7, shape=("T", "N", 3), outputs={"y": (2, "N", 4)}, weights=weights)


def pools_10() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["a"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1),
        helper.make_node(
            "AveragePool", ["x"], ["b"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode=1
        ),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    return model(nodes, 10)


def modern() -> onnx.ModelProto:
    """Opset 21, which stays as it is."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale"], ["a"], "norm", axis=-1),
        helper.make_node("Gelu", ["a"], ["b"], "gelu", approximate="tanh"),
        helper.make_node("ReduceMax", ["b", "axes"], ["y"], "max"),
    ]
    return model(nodes, 21, weights={"scale": _weights(8), "axes": np.array([2], np.int64)})


def faulty() -> onnx.ModelProto:
    """Many faults at once: unsorted nodes, equal names, an alias of the domain, a missing operator set, a wrong declared type."""
    made = model(
        [
            helper.make_node("Gelu", ["b"], ["y"], "node", domain="com.microsoft"),
            helper.make_node("Upsample", ["a", "s"], ["b"], "node", mode="linear"),
            helper.make_node("Relu", ["x"], ["a"], "node", domain="ai.onnx"),
        ],
        17,
        weights={"s": _floats(1, 1, 2, 2)},
    )
    made.graph.value_info.append(value("a", [1, 2], TensorProto.INT64))
    made.ir_version = 14
    return made


def outer_value() -> onnx.ModelProto:
    """A branch that returns a tensor from outside, and one that writes a name from outside."""
    bodies = [
        helper.make_graph([], "then", [], [value("x", _IMAGE)]),
        helper.make_graph([helper.make_node("Abs", ["x"], ["a"])], "else", [], [value("a", _IMAGE)]),
    ]
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["b"], then_branch=bodies[0], else_branch=bodies[1]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    return model(nodes, 13, weights={"zero": np.array(0, np.float32)})


def custom_operators() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Deform", ["x"], ["a"], "deform", domain="mmdeploy"),
        helper.make_node("ATen", ["a"], ["y"], "aten", domain="org.pytorch.aten"),
    ]
    return model(nodes, 13, domains={"mmdeploy": 1, "org.pytorch.aten": 1})


def _write(make: Callable[[], onnx.ModelProto], folder: Path) -> Path:
    path = folder / f"{make.__name__}.onnx"
    path.write_bytes(make().SerializeToString())
    return path


def _external(folder: Path) -> Path:
    """Weights in a file beside the model."""
    path = folder / "external.onnx"
    onnx.save_model(upsample_7(), path, save_as_external_data=True, location="external.bin", size_threshold=0)
    return path


_MODELS: tuple[Callable[[], onnx.ModelProto], ...] = (
    upsample_7,
    upsample_8,
    upsample_9,
    resize_10,
    softmax_11,
    group_norm_18,
    attributes_7,
    branches_9,
    function_17,
    machine_learning,
    lstm_7,
    pools_10,
    modern,
    faulty,
    outer_value,
)
MODELS: dict[str, ZooModel] = {
    **{make.__name__: ZooModel("onnx", partial(_write, make)) for make in _MODELS},
    "external": ZooModel("onnx", _external),
    "custom_operators": ZooModel("onnx", partial(_write, custom_operators), diagnosis="mmdeploy::Deform"),
}
