"""Small FP32 networks with random weights, as onnx protobufs and artifacts: what quantisation is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact


class Network:
    """A graph being built: each method adds an operator and returns the name of its result."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def op(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(self, *shape: int, fan_in: int = 1) -> str:
        return self.weight(self._rng.normal(0, fan_in**-0.5, shape).astype(np.float32))

    def conv(self, x: str, channels: int, filters: int, size: int = 3) -> str:
        w = self.normal(filters, channels, size, size, fan_in=channels * size * size // 2)
        return self.op("Conv", x, w, self.normal(filters, fan_in=100), pads=[size // 2] * 4)

    def gemm(self, x: str, width: int, outputs: int, name: str = "") -> str:
        return self.op("Gemm", x, self.normal(width, outputs, fan_in=width), self.normal(outputs), name=name)

    def artifact(
        self, inputs: dict[str, list[int | str]], outputs: dict[str, list[int | str]], opset: int = 17
    ) -> Artifact:
        graph = helper.make_graph(
            self.nodes,
            "network",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.checker.check_model(model)
        return Artifact.from_bytes(model.SerializeToString())


def cnn(channels: int = 32, batch: int | str = "N") -> Artifact:
    """x (batch, 3, 12, 12) to y (batch, 10): convolutions with ReLU, one residual block, pooling, Gemm."""
    n = Network()
    x = n.op("Relu", n.conv("x", 3, channels), name="stem")
    y = n.op("Relu", n.conv(x, channels, channels))
    x = n.op("Relu", n.op("Add", x, n.conv(y, channels, channels)))
    x = n.op("Flatten", n.op("GlobalAveragePool", n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])))
    n.gemm(x, channels, 10, name="y")
    return n.artifact({"x": [batch, 3, 12, 12]}, {"y": [batch, 10]})


def mlp(width: int = 64, opset: int = 17) -> Artifact:
    """x (N, 16) to y (N, 4), two hidden layers with ReLU."""
    n = Network()
    x = n.op("Relu", n.gemm("x", 16, width), name="hidden")
    x = n.op("Relu", n.gemm(x, width, width))
    n.gemm(x, width, 4, name="y")
    return n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}, opset)


def attention(width: int = 32) -> Artifact:
    """x (N, 5, width) to y (N, 5, width): masked self-attention, with a mask of -10000."""
    n = Network()
    q, k, v = (n.op("MatMul", "x", n.normal(width, width, fan_in=width), name=name) for name in "qkv")
    scores = n.op("MatMul", q, n.op("Transpose", k, perm=[0, 2, 1]), name="scores")
    scaled = n.op("Mul", scores, n.weight(np.float32(width**-0.5)), name="scaled")
    mask = n.weight(np.triu(np.full((5, 5), -10000, np.float32), 1))
    shares = n.op("Softmax", n.op("Add", scaled, mask, name="masked"), name="shares")
    mixed = n.op("MatMul", shares, v, name="mixed")
    n.op("Add", n.op("MatMul", mixed, n.normal(width, width, fan_in=width)), "x", name="y")
    return n.artifact({"x": ["N", 5, width]}, {"y": ["N", 5, width]})


def images(count: int, seed: int = 1) -> np.ndarray:
    """Inputs for ``cnn``, shape (count, 3, 12, 12)."""
    return np.random.default_rng(seed).standard_normal((count, 3, 12, 12)).astype(np.float32)


def in_type(artifact: Artifact, datatype: int) -> Artifact:
    """``artifact``, which has only FP32 tensors, with weights, inputs and outputs of another float type."""
    model = onnx.load_model_from_string(artifact.data)
    dtype = helper.tensor_dtype_to_np_dtype(datatype)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = datatype
    del model.graph.value_info[:]
    return Artifact.from_bytes(model.SerializeToString())
