"""ONNX models with the shapes and cost of real models, but with random weights. The same seed gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike
from onnx import TensorProto, helper, numpy_helper

_OPSET = 17
_IR_VERSION = 8


class GraphBuilder:
    """Collects the nodes and weights of a model. Every method that adds nodes returns the name of its output."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def weight(self, array: ArrayLike, dtype: DTypeLike = np.float32) -> str:
        name = f"weight_{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def normal(self, scale: float, *shape: int) -> str:
        return self.weight(self.rng.normal(0, scale, shape))

    def conv(self, x: str, channels_in: int, channels: int, kernel: int, stride: int = 1, relu: bool = True) -> str:
        """A convolution, a BatchNormalization, and (with ``relu``) a ReLU. The weights are initialised as by He et al., 2015."""
        return self._conv(x, (channels, channels_in, kernel, kernel), stride, 1, relu)

    def _conv(self, x: str, shape: tuple[int, int, int, int], stride: int, group: int, relu: bool) -> str:
        channels, fan_in, kernel, _ = shape
        w = self.normal((2 / (fan_in * kernel**2)) ** 0.5, *shape)
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        y = self.op("Conv", x, w, **sizes, **({"group": group} if group > 1 else {}))
        scale, variance = (self.weight(self.rng.uniform(0.8, 1.2, channels)) for _ in range(2))
        bias, mean = (self.normal(0.1, channels) for _ in range(2))
        y = self.op("BatchNormalization", y, scale, bias, mean, variance)
        return self.op("Relu", y) if relu else y

    def residual(self, x: str, channels_in: int, channels: int, stride: int) -> str:
        """Two 3×3 convolutions with a shortcut (He et al., "Deep Residual Learning", 2016)."""
        y = self.conv(self.conv(x, channels_in, channels, 3, stride), channels, channels, 3, relu=False)
        same = stride == 1 and channels_in == channels
        shortcut = x if same else self.conv(x, channels_in, channels, 1, stride, relu=False)
        return self.op("Relu", self.op("Add", y, shortcut))

    def bottleneck(self, x: str, channels_in: int, width: int, stride: int) -> str:
        """A 1×1 convolution to ``width`` channels, a 3×3 convolution, and a 1×1 convolution to ``4 * width`` channels, with a
        shortcut.
        """
        y = self.conv(self.conv(x, channels_in, width, 1), width, width, 3, stride)
        y = self.conv(y, width, 4 * width, 1, relu=False)
        same = channels_in == 4 * width
        return self.op("Relu", self.op("Add", y, x if same else self.conv(x, channels_in, 4 * width, 1, stride, False)))

    def relu6(self, x: str) -> str:
        return self.op("Clip", x, self.weight(0.0), self.weight(6.0))

    def inverted_residual(self, x: str, channels_in: int, channels: int, expansion: int, stride: int) -> str:
        """A 1×1 convolution to ``expansion`` times the channels, a depthwise 3×3 convolution, and a 1×1 convolution to
        ``channels``. Has a shortcut if the shapes agree.
        """
        width = expansion * channels_in
        y = self.relu6(self.conv(x, channels_in, width, 1, relu=False)) if expansion > 1 else x
        y = self.relu6(self._conv(y, (width, 1, 3, 3), stride, width, relu=False))
        y = self.conv(y, width, channels, 1, relu=False)
        return self.op("Add", y, x) if stride == 1 and channels_in == channels else y

    def classify(self, x: str, channels: int, classes: int) -> str:
        pooled = self.op("Flatten", self.op("GlobalAveragePool", x))
        return self.op("Gemm", pooled, self.normal(channels**-0.5, channels, classes), self.weight(np.zeros(classes)))

    def linear(self, x: str, rows: int, columns: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.normal(rows**-0.5, rows, columns)), self.normal(0.02, columns))

    def layer_norm(self, x: str, width: int) -> str:
        scale = self.weight(self.rng.uniform(0.8, 1.2, width))
        return self.op("LayerNormalization", x, scale, self.weight(np.zeros(width)), axis=-1)

    def gelu(self, x: str) -> str:
        """GELU as the five operators that exporters write."""
        erf = self.op("Erf", self.op("Div", x, self.weight(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", erf, self.weight(1.0))), self.weight(0.5))

    def attention(self, x: str, width: int, heads: int) -> str:
        split = self.weight([0, 0, heads, width // heads], np.int64)
        queries, keys, values = (self.op("Reshape", self.linear(x, width, width), split) for _ in range(3))
        queries, values = (self.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (queries, values))
        scores = self.op("MatMul", queries, self.op("Transpose", keys, perm=[0, 2, 3, 1]))
        share = self.op("Softmax", self.op("Mul", scores, self.weight((width // heads) ** -0.5)), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", share, values), perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", mixed, self.weight([0, 0, width], np.int64)), width, width)

    def save(self, path: Path, output: str, shape_in: Sequence[int], shape_out: Sequence[int]) -> Path:
        """Write the model. ``input`` and ``output`` are FP32 and have the given shapes after a free first axis."""
        nodes = [*self._nodes, helper.make_node("Identity", [output], ["output"])]
        inputs, outputs = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])]
            for name, shape in (("input", shape_in), ("output", shape_out))
        )
        graph = helper.make_graph(nodes, path.stem, inputs, outputs, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def mlp(path: Path, widths: tuple[int, int, int] = (32, 64, 8), seed: int = 0) -> Path:
    """An MLP, by default of 32 → 64 → 8. It takes almost no time, so that the cost of everything else can be measured."""
    rows, inner, columns = widths
    graph = GraphBuilder(seed)
    hidden = graph.op("Relu", graph.linear("input", rows, inner))
    return graph.save(path, graph.linear(hidden, inner, columns), [rows], [columns])


def identity(path: Path, size: int) -> Path:
    """A model that returns its input rows of ``size`` numbers, to measure the transport of tensors."""
    return GraphBuilder().save(path, "input", [size], [size])


def small_cnn(path: Path) -> Path:
    """A residual network for 3×64×64 images. One call takes about three milliseconds on one core."""
    graph = GraphBuilder()
    x = graph.conv("input", 3, 32, 3, 2)
    for channels_in, channels in ((32, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        x = graph.residual(x, channels_in, channels, channels // channels_in)
    return graph.save(path, graph.classify(x, 128, 10), [3, 64, 64], [10])


def resnet18(path: Path, size: int = 224, seed: int = 0) -> Path:
    """ResNet-18 for 3×``size``×``size`` images, BatchNormalization not folded."""
    graph = GraphBuilder(seed)
    x = graph.conv("input", 3, 64, 7, 2)
    x = graph.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels_in = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            x = graph.residual(x, channels_in, channels, 2 if block == 0 and channels > 64 else 1)
            channels_in = channels
    return graph.save(path, graph.classify(x, 512, 1000), [3, size, size], [1000])


def encoder(path: Path) -> Path:
    """Six post-norm transformer layers of width 384 on 128 embedded tokens, as in small BERT models."""
    width, heads, tokens = 384, 6, 128
    graph = GraphBuilder()
    x = "input"
    for _ in range(6):
        x = graph.layer_norm(graph.op("Add", x, graph.attention(x, width, heads)), width)
        inner = graph.gelu(graph.linear(x, width, 4 * width))
        x = graph.layer_norm(graph.op("Add", x, graph.linear(inner, 4 * width, width)), width)
    return graph.save(path, x, [tokens, width], [tokens, width])


def resnet50(path: Path) -> Path:
    """ResNet-50 for 3×224×224 images with the stride in its 3×3 convolutions, BatchNormalization not folded."""
    graph = GraphBuilder()
    x = graph.conv("input", 3, 64, 7, 2)
    x = graph.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            x = graph.bottleneck(x, channels_in, width, 2 if block == 0 and width > 64 else 1)
            channels_in = 4 * width
    return graph.save(path, graph.classify(x, 2048, 1000), [3, 224, 224], [1000])


def mobilenet(path: Path) -> Path:
    """MobileNet-v2 for 3×224×224 images (Sandler et al., "MobileNetV2", 2018), BatchNormalization not folded."""
    graph = GraphBuilder()
    x = graph.relu6(graph.conv("input", 3, 32, 3, 2, relu=False))
    channels_in = 32
    for expansion, channels, blocks, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for block in range(blocks):
            x = graph.inverted_residual(x, channels_in, channels, expansion, stride if block == 0 else 1)
            channels_in = channels
    x = graph.relu6(graph.conv(x, 320, 1280, 1, relu=False))
    return graph.save(path, graph.classify(x, 1280, 1000), [3, 224, 224], [1000])
