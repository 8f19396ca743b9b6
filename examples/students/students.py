"""Small students as ONNX graphs with random weights, for distillation. Width and depth are free; the inputs are the teacher's.

The networks have no BatchNormalization: distillation uses the statistics in the file, and a new network has no statistics.
"""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.tensor import Signature, TensorSpec

OPSET = 17


class Graph:
    """Nodes and weights; each method adds an operator and returns the name of its result."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, result: str = "", **attributes: object) -> str:
        result = result or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [result], **attributes))
        return result

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(self, *shape: int, fan_in: int) -> str:
        """Weights that keep the variance before a ReLU [He et al., "Delving Deep into Rectifiers", 2015]."""
        return self.constant(self._rng.normal(0, (2 / fan_in) ** 0.5, shape).astype(np.float32))

    def conv(self, x: str, channels: int, filters: int, size: int, groups: int = 1) -> str:
        fan_in = channels // groups * size * size
        w = self.normal(filters, channels // groups, size, size, fan_in=fan_in)
        zeros = self.constant(np.zeros(filters, np.float32))
        return self.op("Relu", self.op("Conv", x, w, zeros, pads=[size // 2] * 4, group=groups))

    def linear(self, x: str, width: int, outputs: int) -> str:
        product = self.op("MatMul", x, self.normal(width, outputs, fan_in=2 * width))
        return self.op("Add", product, self.constant(np.zeros(outputs, np.float32)))

    def norm(self, x: str, width: int) -> str:
        ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
        return self.op("LayerNormalization", x, self.constant(ones), self.constant(zeros))

    def shape(self, *sizes: int) -> str:
        return self.constant(np.array(sizes, np.int64))


def depthwise_cnn(signature: Signature, width: int, depth: int, seed: int = 0) -> Artifact:
    """A network from images [N, C, H, W] to scores [N, classes]: a 3×3 stem, then ``depth`` residual blocks of a depthwise 3×3 and a
    pointwise 1×1 convolution [Howard et al., "MobileNets", 2017], global average, linear."""
    source, target, g = signature.inputs[0], signature.outputs[0], Graph(seed)
    x = g.conv(source.name, source.shape[1], width, 3)
    for _ in range(depth):
        x = g.op("Add", x, g.conv(g.conv(x, width, width, 3, groups=width), width, width, 1))
    return _classify(g, g.op("Flatten", g.op("GlobalAveragePool", x)), width, source, target)


def narrow_encoder(signature: Signature, width: int, depth: int, seed: int = 0) -> Artifact:
    """A network from sequences [N, L, F], or images [N, C, H, W] read row by row, to scores [N, classes]: ``depth`` layers of
    one-headed attention and a perceptron, each after a normalisation [Vaswani et al., 2017], the mean over positions, and a linear
    layer."""
    source, target, g = signature.inputs[0], signature.outputs[0], Graph(seed)
    if len(source.shape) == 4:
        _, channels, length, columns = source.shape
        rows = g.op("Transpose", source.name, perm=[0, 2, 1, 3])
        features, x = channels * columns, g.op("Reshape", rows, g.shape(-1, length, channels * columns))
    else:
        _, length, features, x = *source.shape, source.name
    places = g.normal(length, width, fan_in=2 * width)
    x = g.op("Add", g.linear(x, features, width), places)
    for _ in range(depth):
        x = g.op("Add", x, _attention(g, g.norm(x, width), width))
        hidden = g.op("Relu", g.linear(g.norm(x, width), width, 2 * width))
        x = g.op("Add", x, g.linear(hidden, 2 * width, width))
    pooled = g.op("ReduceMean", g.norm(x, width), axes=[1], keepdims=0)
    return _classify(g, pooled, width, source, target)


STUDENTS: dict[str, Callable[..., Artifact]] = {"depthwise": depthwise_cnn, "encoder": narrow_encoder}


def _attention(g: Graph, x: str, width: int) -> str:
    queries, keys, values = (g.linear(x, width, width) for _ in range(3))
    scores = g.op("MatMul", queries, g.op("Transpose", keys, perm=[0, 2, 1]))
    shares = g.op("Softmax", g.op("Mul", scores, g.constant(np.float32([width**-0.5]))), axis=-1)
    return g.linear(g.op("MatMul", shares, values), width, width)


def _classify(g: Graph, x: str, width: int, source: TensorSpec, target: TensorSpec) -> Artifact:
    """The model, which ends with a linear layer from ``x`` to the classes."""
    classes = target.shape[1]
    weight, bias = g.normal(width, classes, fan_in=2 * width), g.constant(np.zeros(classes, np.float32))
    g.op("Gemm", x, weight, bias, result=target.name)
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, ["N", *spec.shape[1:]])]
        for spec in (source, target)
    )
    graph = helper.make_graph(g.nodes, "student", inputs, outputs, g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    return Artifact.from_bytes(model.SerializeToString(deterministic=True))
