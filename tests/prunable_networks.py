"""Random networks of every piece that structured pruning understands, and the oracle that a cut is held against."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from networks import Network
from penstock.artifact import Artifact
from penstock.offline.compress.pruning.structured.cut import Kept, Structure
from penstock.offline.optimize.model import to_artifact


class Images(Network):
    """A convolutional network for x (N, 3, 8, 8) that grows piece by piece; ``pieces`` names them."""

    pieces = (
        *("conv", "depthwise", "grouped", "norm", "prelu", "scale", "residual", "squeeze_excite"),
        *("concat", "split", "slice", "gather", "pad", "resize", "pool", "transposed"),
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.x, self.channels, self.size = "x", 3, 8

    def add(self, piece: str) -> None:
        getattr(self, piece)()

    def conv(self) -> None:
        channels = int(self._rng.choice([4, 6, 8]))
        self.x = self.op("Relu", super().conv(self.x, self.channels, channels))
        self.channels = channels

    def depthwise(self) -> None:
        weight = self.normal(2 * self.channels, 1, 3, 3, fan_in=9)
        self.x = self.op("Conv", self.x, weight, pads=[1] * 4, group=self.channels)
        self.channels *= 2

    def grouped(self) -> None:
        self.conv()
        weight = self.normal(12, self.channels // 2, 3, 3, fan_in=20)
        self.x = self.op("Conv", self.x, weight, self.normal(12), pads=[1] * 4, group=2)
        self.channels = 12

    def norm(self) -> None:
        scale, bias, mean = (self.normal(self.channels) for _ in range(3))
        variance = self.weight(self._rng.uniform(0.5, 2, self.channels).astype(np.float32))
        self.x = self.op("BatchNormalization", self.x, scale, bias, mean, variance)

    def prelu(self) -> None:
        self.x = self.op("PRelu", self.x, self.normal(self.channels, 1, 1))

    def scale(self) -> None:
        scaled = self.op("Mul", self.normal(1, self.channels, 1, 1), self.x)
        self.x = self.op("Add", scaled, self.normal(self.channels, 1, 1))

    def residual(self) -> None:
        inner = self.op("Relu", super().conv(self.x, self.channels, 8))
        self.x = self.op("Add", super().conv(inner, 8, self.channels), self.x)

    def squeeze_excite(self) -> None:
        pooled = self.op("GlobalAveragePool", self.x)
        inner = self.op("Relu", super().conv(pooled, self.channels, 4, size=1))
        self.x = self.op("Mul", self.x, self.op("Sigmoid", super().conv(inner, 4, self.channels, size=1)))

    def concat(self) -> None:
        self.x = self.op("Concat", self.x, super().conv(self.x, self.channels, 4), axis=1)
        self.channels += 4

    def split(self) -> None:
        self.conv()
        half = self.channels // 2
        name = f"split{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node("Split", [self.x], [f"{name}a", f"{name}b"], axis=1))
        self.x = self.op("Concat", super().conv(f"{name}b", half, 4), f"{name}a", axis=1)
        self.channels = half + 4

    def slice(self) -> None:
        self.conv()
        bounds = [self.weight(np.array([number])) for number in (1, self.channels - 1, 1)]
        self.x = self.op("Slice", self.x, *bounds)
        self.channels -= 2

    def gather(self) -> None:
        order = self._rng.permutation(self.channels)
        self.x = self.op("Gather", self.x, self.weight(order), axis=1)

    def pad(self) -> None:
        self.x = self.op("Pad", self.x, self.weight(np.array([0, 0, 1, 1, 0, 0, 0, 0])))
        self.size += 1

    def resize(self) -> None:
        sizes = self.weight(np.array([2, self.channels, self.size + 2, self.size + 2]))
        self.x = self.op("Resize", self.x, "", "", sizes, mode="nearest")
        self.size += 2

    def pool(self) -> None:
        self.x = self.op("MaxPool", self.x, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
        self.size = (self.size + 1) // 2

    def transposed(self) -> None:
        weight = self.normal(self.channels, 6, 2, 2, fan_in=self.channels)
        self.x = self.op("ConvTranspose", self.x, weight, self.normal(6))
        self.size, self.channels = self.size + 1, 6

    def classify(self, how: str) -> Artifact:
        """``how``: flatten, reshape, mean, pool."""
        width = self.channels
        if how == "flatten":
            flat, width = self.op("Flatten", self.x), width * self.size**2
        elif how == "reshape":
            width *= self.size**2
            flat = self.op("Reshape", self.x, self.weight(np.array([-1, width])))
        elif how == "mean":
            flat = self.op("ReduceMean", self.x, axes=[2, 3], keepdims=0)
        else:
            flat = self.op("Squeeze", self.op("GlobalAveragePool", self.x), self.weight(np.array([2, 3])))
        hidden = self.op("Gemm", flat, self.normal(12, width, fan_in=width), self.normal(12), transB=1)
        hidden = self.op("MatMul", self.op("Tanh", hidden), self.normal(12, 6, fan_in=12))
        self.op("Gemm", self.op("Add", hidden, self.normal(6)), self.normal(6, 5, fan_in=6), name="y")
        return self.artifact({"x": [2, 3, 8, 8]}, {"y": [2, 5]})


def encoder(heads: int = 4, size: int = 3, batch: int | str = "N") -> Artifact:
    """x (batch, 5, 6) to y (batch, 5, 6): one transformer layer whose embedding is a layer of its own; heads as exporters write."""
    n, width = Network(), heads * size
    x = n.op("MatMul", "x", n.normal(6, width, fan_in=6))
    split = n.weight(np.array([0, 0, heads, size]))
    parts = [n.op("Add", n.op("MatMul", x, n.normal(width, width, fan_in=width)), n.normal(width)) for _ in "qkv"]
    q, k, v = (n.op("Transpose", n.op("Reshape", part, split), perm=[0, 2, 1, 3]) for part in parts)
    scores = n.op("MatMul", q, n.op("Transpose", k, perm=[0, 1, 3, 2]))
    shares = n.op("Softmax", n.op("Mul", scores, n.weight(np.float32(size**-0.5))), axis=-1)
    mixed = n.op("Transpose", n.op("MatMul", shares, v), perm=[0, 2, 1, 3])
    joined = n.op("Reshape", mixed, n.weight(np.array([0, 0, width])))
    x = n.op("Add", x, n.op("MatMul", joined, n.normal(width, width, fan_in=width)))
    x = n.op("LayerNormalization", x, n.normal(width), n.normal(width))
    inner = n.op("MatMul", x, n.normal(width, 16, fan_in=width))
    inner = n.op("Mul", inner, n.op("Sigmoid", inner))
    x = n.op("Add", x, n.op("MatMul", inner, n.normal(16, width, fan_in=16)))
    n.op("MatMul", x, n.normal(width, 6, fan_in=width), name="y")
    return n.artifact({"x": [batch, 5, 6]}, {"y": [batch, 5, 6]})


def random_cut(structure: Structure, seed: int) -> dict[str, list[int]]:
    """Of every group that can be cut, some units, at least one."""
    rng = np.random.default_rng(seed)
    kept = {}
    for group in structure.groups:
        if group.cuttable:
            free = [unit for unit in range(group.units) if unit not in group.frozen]
            count = int(rng.integers(0 if group.frozen else 1, len(free)))
            kept[group.name] = sorted([*group.frozen, *rng.permutation(free)[:count].tolist()])
    return kept


def without_what_they_lead_to(structure: Structure, kept: Kept) -> Artifact:
    """The model whole, but with zeros where weights read the channels that ``kept`` leaves out. Each use has its own weight."""
    proto = onnx.load_model_from_string(to_artifact(structure.model).data)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    numbers = {node: number for number, node in enumerate(structure.model.graph)}
    count = structure.count(kept)
    own: dict[tuple[int, int], np.ndarray] = {}
    for slot in structure.slots:
        if slot.role == "reads":
            array = own.setdefault((numbers[slot.node], slot.operand), arrays[slot.value.name or ""].copy())
            np.moveaxis(array, slot.axis, 0)[~count(slot.labels)] = 0
    for (number, operand), array in own.items():
        name = f"own {number} {operand}"
        proto.graph.node[number].input[operand] = name
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return Artifact.from_bytes(proto.SerializeToString())
