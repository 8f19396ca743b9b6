"""Small networks as ONNX graphs with random weights, which ``train.py`` trains. All have the input ``input`` and the output
``output``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.compression.data import TOKENS
from benchmarks.models import GraphBuilder
from penstock.artifact import Artifact
from penstock.tensor import Array

_OPSET, _IR_VERSION = 17, 8


class Net(GraphBuilder):
    """Layers with biases and without BatchNormalization, small enough to train on one core within a minute."""

    def layer(
        self, x: str, channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1, gain: float = 1.0
    ) -> str:
        """A convolution that keeps the size, except for its stride. The weights are initialised as by He et al., 2015, and
        multiplied by ``gain``.
        """
        fan_in = channels_in // groups * kernel**2
        w = self.normal(gain * (2 / fan_in) ** 0.5, channels, channels_in // groups, kernel, kernel)
        b = self.weight(np.zeros(channels))
        return self.op(
            "Conv", x, w, b, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4, group=groups
        )

    def valid(self, x: str, channels_in: int, channels: int, kernel: int) -> str:
        """A convolution without padding."""
        w = self.normal((2 / (channels_in * kernel**2)) ** 0.5, channels, channels_in, kernel, kernel)
        return self.op("Conv", x, w, self.weight(np.zeros(channels)), kernel_shape=[kernel] * 2)

    def gemm(self, x: str, rows: int, columns: int) -> str:
        return self.op("Gemm", x, self.normal((2 / rows) ** 0.5, rows, columns), self.weight(np.zeros(columns)))

    def relu(self, x: str) -> str:
        return self.op("Relu", x)

    def dense(self, x: str, widths: Sequence[int]) -> str:
        """A sequence of Gemm operators with ReLU in between."""
        for number, (rows, columns) in enumerate(itertools.pairwise(widths)):
            x = self.gemm(self.relu(x) if number else x, rows, columns)
        return x

    def artifact(self, output: str, shape_in: Sequence[int], shape_out: Sequence[int], kind: int) -> Artifact:
        """The model, with a free first axis."""
        nodes = [*self._nodes, helper.make_node("Identity", [output], ["output"])]
        inputs = [helper.make_tensor_value_info("input", kind, ["N", *shape_in])]
        outputs = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", *shape_out])]
        graph = helper.make_graph(nodes, "net", inputs, outputs, self._weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
        onnx.checker.check_model(model)
        return Artifact.from_bytes(model.SerializeToString(deterministic=True))


def plain() -> Artifact:
    """Three convolutions for 8×8 images."""
    net = Net()
    x = net.relu(net.layer("input", 1, 32, 3))
    x = net.relu(net.layer(x, 32, 48, 3, 2))
    x = net.relu(net.layer(x, 48, 64, 3, 2))
    return _classifier(net, net.op("Flatten", x), 256, [1, 8, 8])


def depthwise() -> Artifact:
    """Alternating depthwise and pointwise convolutions (Howard et al., "MobileNets", 2017)."""
    net = Net()
    x = net.relu(net.layer("input", 1, 32, 3))
    for channels_in, channels, stride in ((32, 48, 1), (48, 64, 2), (64, 96, 1)):
        x = net.relu(net.layer(x, channels_in, channels_in, 3, stride, groups=channels_in))
        x = net.relu(net.layer(x, channels_in, channels, 1))
    return _classifier(net, _pooled(net, x), 96, [1, 8, 8])


def deep() -> Artifact:
    """Ten pairs of a depthwise and a pointwise convolution, each with a shortcut. These are 22 groups of operators to quantise."""
    net = Net()
    x = net.relu(net.layer("input", 1, 32, 3))
    for _ in range(10):
        y = net.relu(net.layer(x, 32, 32, 3, groups=32))
        x = net.relu(net.op("Add", net.layer(y, 32, 32, 1, gain=0.3), x))
    return _classifier(net, _pooled(net, x), 32, [1, 8, 8])


def residual() -> Artifact:
    """A stem and three residual blocks. The weights of each block's last convolution start small, because there is no
    normalisation.
    """
    net = Net()
    x = net.relu(net.layer("input", 1, 32, 3))
    for channels_in, channels, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1)):
        y = net.relu(net.layer(x, channels_in, channels, 3, stride))
        y = net.layer(y, channels, channels, 3, gain=0.2)
        same = channels_in == channels
        x = net.relu(net.op("Add", y, x if same else net.layer(x, channels_in, channels, 1, stride)))
    return _classifier(net, _pooled(net, x), 64, [1, 8, 8])


def mlp() -> Artifact:
    """An MLP of 64 → 128 → 64 → 10 on the pixels."""
    net = Net()
    return net.artifact(net.dense(net.op("Flatten", "input"), (64, 128, 64, 10)), [1, 8, 8], [10], TensorProto.FLOAT)


def encoder() -> Artifact:
    """Two transformer layers of width 64 on characters, followed by their mean and a classifier for four classes."""
    net, width = Net(), 64
    x = net.op("Gather", net.normal(0.5, 128, width), "input")
    x = net.op("Add", x, net.normal(0.5, TOKENS, width))
    for _ in range(2):
        x = net.layer_norm(net.op("Add", x, net.attention(x, width, 4)), width)
        inner = net.gelu(net.linear(x, width, 4 * width))
        x = net.layer_norm(net.op("Add", x, net.linear(inner, 4 * width, width)), width)
    mean = net.op("ReduceMean", x, axes=[1], keepdims=0)
    return net.artifact(net.gemm(mean, width, 4), [TOKENS], [4], TensorProto.INT64)


def autoencoder() -> Artifact:
    """An autoencoder of 64 → 128 → 24 → 128 → 64 that reproduces the pixels (a regression)."""
    net = Net()
    return net.artifact(net.dense("input", (64, 128, 24, 128, 64)), [64], [64], TensorProto.FLOAT)


def lenet_300_100(classes: int = 10) -> Artifact:
    """An MLP of 784 → 300 → 100 → classes (LeCun et al., "Gradient-based learning applied to document recognition", 1998)."""
    net = Net()
    flat = net.op("Flatten", "input")
    return net.artifact(net.dense(flat, (784, 300, 100, classes)), [1, 28, 28], [classes], TensorProto.FLOAT)


def lenet_5(classes: int = 10) -> Artifact:
    """The network with 431 k weights that papers on pruning call LeNet-5: two convolutions and two linear layers."""
    net = Net()
    x = net.op("MaxPool", net.valid("input", 1, 20, 5), kernel_shape=[2, 2], strides=[2, 2])
    x = net.op("MaxPool", net.valid(x, 20, 50, 5), kernel_shape=[2, 2], strides=[2, 2])
    x = net.dense(net.op("Flatten", x), (800, 500, classes))
    return net.artifact(x, [1, 28, 28], [classes], TensorProto.FLOAT)


def gemm_stack(pairs: int = 2) -> Artifact:
    """Several blocks of 1024 → 4096 → 1024: only the feed-forward part of a large encoder, with random weights."""
    net = Net()
    return net.artifact(net.dense("input", (1024, *(4096, 1024) * pairs)), [1024], [1024], TensorProto.FLOAT)


def with_outliers(model: Artifact, factor: float = 60.0, every: int = 9, only: int | None = None) -> Artifact:
    """The same function as ``model``, but with some channels between a depthwise and its pointwise convolution scaled by
    ``factor``. Folding a BatchNormalization with a tiny variance has this effect. Scales every ``every``-th channel, in all pairs
    of convolutions or in the pair number ``only``.
    """
    proto = onnx.load_model_from_string(model.data)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    readers = {node.input[0]: node for node in proto.graph.node}
    convolutions = [node for node in proto.graph.node if node.op_type == "Conv" and _groups(node) > 1]
    for node in convolutions if only is None else convolutions[only : only + 1]:
        groups = _groups(node)
        pointwise = readers[readers[node.output[0]].output[0]]
        scale = np.ones(groups, np.float32)
        scale[::every] = factor
        _scale(weights[node.input[1]], scale[:, None, None, None])
        _scale(weights[node.input[2]], scale)
        _scale(weights[pointwise.input[1]], 1 / scale[None, :, None, None])
    return model.derive(
        proto.SerializeToString(deterministic=True), "outliers", {"factor": factor, "every": every, "only": only}, {}
    )


def _groups(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "group"), 1)


def _scale(tensor: onnx.TensorProto, factor: Array) -> None:
    scaled = numpy_helper.to_array(tensor) * factor
    tensor.CopyFrom(numpy_helper.from_array(scaled.astype(np.float32), tensor.name))


def _pooled(net: Net, x: str) -> str:
    return net.op("Flatten", net.op("GlobalAveragePool", x))


def _classifier(net: Net, x: str, width: int, shape: Sequence[int]) -> Artifact:
    return net.artifact(net.gemm(x, width, 10), shape, [10], TensorProto.FLOAT)
