"""Remove the rounding from a model that is already quantised, so that it can be quantised again.

1. Constant integers become FP32 constants: the values that they stand for. The original weights are not known.
2. A QuantizeLinear with the DequantizeLinear of its result becomes the identity. If the range begins at 0 and a product or sum
   computes the tensor, the range may replace a Relu or Relu6; then a Clip to the range takes its place. A Clip from below 0 that a
   range replaced is lost.
3. Integer operators (``QLinear…``, QGemm) become the float operators. So do products of dynamically quantised tensors (MatMulInteger,
   ConvInteger, DynamicQuantizeLSTM). Operators that move integers move floats.

The outputs differ from those of the quantised model by its rounding, and where its ranges clip. Operators that cannot be converted
stay as they are, and so do integers that the caller gives or receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.offline.compress.precision.products import MICROSOFT
from penstock.offline.compress.ptq.qdq_placement import attributes_of
from penstock.offline.optimize.mapped import array_of, artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array

_UNARY = {"QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearSoftmax": "Softmax"} | {
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearAveragePool": "AveragePool",
}
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul", "QLinearMatMul": "MatMul", "QLinearConv": "Conv", "QGemm": "Gemm"}
_MOVING = frozenset(
    {"Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators on integers that do the same to the numbers for which the integers stand."""
_ABSORBING = frozenset({"Add", "BatchNormalization", "Conv", "ConvTranspose", "Gemm", "MatMul", "Mul", "Sub"})
"""Operators with which quantisers fuse a Relu that follows."""
_CLIP_OPSET = 11
"""The first opset whose Clip has its bounds as inputs."""
_OWN_ATTRIBUTES = {"channels_last", "opset"}
"""Attributes that the float operators do not have."""


def dequantized(artifact: Artifact) -> Artifact:
    """``artifact`` without rounding; ``artifact`` itself if it has none that can be removed. Raises the errors of ``read_proto``."""
    proto = read_proto(artifact)
    if not any(node.op_type.startswith("Q") or "Quantize" in node.op_type for node in proto.graph.node):
        return artifact
    writer = _Writer(proto)
    made = writer.run()
    if not writer.changed:
        return artifact
    return artifact.derive(artifact_of(made), "dequantize", {}, {})


class _View(NamedTuple):
    """The numbers for which the integers of a tensor stand."""

    name: str
    scale: str
    zero: str


class _Bias(NamedTuple):
    """A constant bias that is divided by the scale of a product at run time, and rounded."""

    array: Array
    scale: tuple[str, Array]


class _Product(NamedTuple):
    """A product of dynamically quantised integers, not scaled yet."""

    node: onnx.NodeProto
    source: _View
    weight: Array
    bias: _Bias | None = None


class _Writer:
    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto, self._fresh = proto, FreshNames(proto.graph)
        self._opset = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
        given = {value.name for value in proto.graph.input}
        self._constants = {one.name: one for one in proto.graph.initializer if one.name not in given}
        for node in proto.graph.node:
            if node.op_type == "Constant" and isinstance(value := attributes_of(node).get("value"), TensorProto):
                self._constants[node.output[0]] = value
        self._makers = {name: node.op_type for node in proto.graph.node for name in node.output}
        """The operator that computes each tensor."""
        self._floats: dict[tuple[str, ...], str] = {}
        """The constants that were dequantised."""
        self._promised = {value.name for value in proto.graph.output}
        self._views: dict[str, _View] = {}
        """By tensor of integers."""
        self._products: dict[str, _Product] = {}
        self._biases: dict[str, _Bias] = {}
        self._scales: dict[str, tuple[str, Array]] = {}
        """Scales that are computed, multiplied by a constant: the name of the scale, and the constant."""
        self._nodes: list[onnx.NodeProto] = []
        self.changed = False
        self._rewrites: dict[str, Callable[[onnx.NodeProto], bool]] = {
            "QuantizeLinear": self._quantize,
            "DequantizeLinear": self._dequantize,
            "DynamicQuantizeLinear": self._quantize_dynamically,
            "MatMulInteger": self._integer_product,
            "ConvInteger": self._integer_product,
            **dict.fromkeys(("Div", "Floor", "Round", "Add"), self._bias),
            "Cast": self._cast,
            "Mul": self._scale,
            "DynamicQuantizeLSTM": self._recurrent,
            "QLinearConcat": self._concat,
            **dict.fromkeys(_UNARY, self._unary),
            **dict.fromkeys(_BINARY, self._binary),
            **dict.fromkeys(_MOVING, self._move),
        }

    def run(self) -> onnx.ModelProto:
        graph = self._proto.graph
        for node in graph.node:
            rewrite = self._rewrites.get(node.op_type) if node.domain in ("", "ai.onnx", MICROSOFT) else None
            if rewrite is None or not rewrite(node):
                self._nodes.append(node)
        used, kept = {value.name for value in graph.output}, list[onnx.NodeProto]()
        for node in reversed(self._nodes):
            if not used.isdisjoint(node.output):
                kept.append(node)
                used |= reads(node)
        tensors = [tensor for tensor in graph.initializer if tensor.name in used]
        for field, values in (("node", kept[::-1]), ("initializer", tensors), ("value_info", [])):
            copied = [type(value).FromString(value.SerializeToString()) for value in values]
            graph.ClearField(field)
            getattr(graph, field).extend(copied)
        return self._proto

    # Each of these writes the float form of a node. It returns False if the node must be written as well; unread nodes are dropped.

    def _quantize(self, node: onnx.NodeProto) -> bool:
        view = _View(node.input[0], node.input[1], _input(node, 2))
        scale = self._array(view.scale)
        if view.name in self._constants or (scale is not None and scale.size == 1):
            self._show(node.output[0], view)
        return False

    def _dequantize(self, node: onnx.NodeProto) -> bool:
        integers, scale, zero = self._array(node.input[0]), self._array(node.input[1]), self._zero(node, 2)
        if integers is not None and scale is not None and zero is not None and node.output[0] not in self._promised:
            tensor = numpy_helper.from_array(_dequantised(integers, scale, zero, attributes_of(node)), node.output[0])
            self._proto.graph.initializer.append(tensor)
            self.changed = True
            return True
        name = self._float(node.input[0], node.input[1], _input(node, 2), attributes_of(node))
        if name:
            self._write("Identity", [name], node.output[0], named=True)
        return bool(name)

    def _quantize_dynamically(self, node: onnx.NodeProto) -> bool:
        self._views[node.output[0]] = _View(node.input[0], node.output[1], node.output[2])
        self._scales[node.output[1]] = node.output[1], np.ones((), np.float32)
        return False

    def _integer_product(self, node: onnx.NodeProto) -> bool:
        view, weight, zero = self._views.get(node.input[0]), self._array(node.input[1]), self._zero(node, 3)
        if view is not None and weight is not None and zero is not None and view.zero == _input(node, 2):
            # A zero point of each row or channel is one of the last axis, or of the first axis of a kernel.
            lined = (
                zero.reshape(-1, *[1] * (weight.ndim - 1)) if node.op_type == "ConvInteger" and zero.size > 1 else zero
            )
            self._products[node.output[0]] = _Product(node, view, weight.astype(np.float32) - lined.astype(np.float32))
        return False

    def _cast(self, node: onnx.NodeProto) -> bool:
        if node.input[0] in self._products and attributes_of(node)["to"] == TensorProto.FLOAT:
            self._products[node.output[0]] = self._products[node.input[0]]
        return self._bias(node)

    def _bias(self, node: onnx.NodeProto) -> bool:
        found = self._biases.get(node.input[0])
        if (
            node.op_type == "Div"
            and node.input[1] in self._scales
            and (array := self._array(node.input[0])) is not None
        ):
            found = _Bias(array, self._scales[node.input[1]])
        if node.op_type == "Add":
            for one, other in (node.input, node.input[::-1]):
                if one in self._products and other in self._biases:
                    self._products[node.output[0]] = self._products[one]._replace(bias=self._biases[other])
        elif found is not None:
            self._biases[node.output[0]] = found
        return False

    def _scale(self, node: onnx.NodeProto) -> bool:
        for one, other in (node.input, node.input[::-1]):
            factor = self._array(other)
            if one in self._scales and factor is not None:
                name, known = self._scales[one]
                self._scales[node.output[0]] = name, known * factor
            product, (name, known) = self._products.get(one), self._scales.get(other, ("", np.ones(())))
            if product is None or product.source.scale != name:
                continue
            is_kernel, bias = product.node.op_type == "ConvInteger", product.bias
            weight = _scaled(product.weight, known, is_kernel)
            is_fit = bias is None or (is_kernel and bias.scale[0] == name and np.array_equal(bias.scale[1], known))
            if weight is not None and is_fit:
                inputs = [product.source.name, self._add(weight, f"{node.output[0]}_weight")]
                inputs += [] if bias is None else [self._add(bias.array.reshape(-1), f"{node.output[0]}_bias")]
                kept = attributes_of(product.node) if is_kernel else {}
                self._write("Conv" if is_kernel else "MatMul", inputs, node.output[0], named=True, **kept)
                return True
        return False

    def _recurrent(self, node: onnx.NodeProto) -> bool:
        weights = []
        for place, scale in ((1, 8), (2, 10)):
            integers, scales = self._array(node.input[place]), self._array(node.input[scale])
            zeros = self._zero(node, scale + 1)
            if integers is None or scales is None or zeros is None:
                return False
            lined = [
                one.reshape(len(integers), 1, -1).astype(np.float32)
                for one in (scales, np.broadcast_to(zeros, scales.shape))
            ]
            floats = (integers.astype(np.float32) - lined[1]) * lined[0]
            weights.append(self._add(floats.transpose(0, 2, 1), f"{node.input[place]}_float"))
        made = helper.make_node("LSTM", [node.input[0], *weights, *node.input[3:8]], node.output, node.name)
        made.attribute.extend(node.attribute)
        self._nodes.append(made)
        self.changed = True
        return True

    def _unary(self, node: onnx.NodeProto) -> bool:
        name = self._float(node.input[0], node.input[1], _input(node, 2))
        return self._operator(_UNARY[node.op_type], [name], node, 3)

    def _binary(self, node: onnx.NodeProto) -> bool:
        axis = {"QLinearConv": 0, "QGemm": 1 - attributes_of(node).get("transB", 0)}.get(node.op_type, -1)
        first = self._array(node.input[1])
        if first is None or first.size > 1:
            return False
        names = [self._float(node.input[at], node.input[at + 1], _input(node, at + 2), {"axis": axis}) for at in (0, 3)]
        place = 8 if node.op_type == "QLinearConv" else 6
        if node.op_type in ("QLinearConv", "QGemm"):
            scales, bias = [self._array(node.input[at]) for at in (1, 4)], self._array(_input(node, place))
            if bias is not None and scales[0] is not None and scales[1] is not None:
                names.append(self._add((bias * scales[0] * scales[1]).astype(np.float32), f"{node.output[0]}_bias"))
            elif _input(node, place):
                return False
        return self._operator(_BINARY[node.op_type], names, node, 7 if node.op_type == "QGemm" else 6)

    def _concat(self, node: onnx.NodeProto) -> bool:
        names = [
            self._float(node.input[at], node.input[at + 1], _input(node, at + 2)) for at in range(2, len(node.input), 3)
        ]
        return self._operator("Concat", names, node, 0)

    def _operator(self, op_type: str, names: Sequence[str], node: onnx.NodeProto, place: int) -> bool:
        """Write ``node`` as ``op_type`` of the floats ``names``. The scale of its result is its input ``place``, if it has one."""
        given = attributes_of(node)
        if not all(names) or given.get("channels_last", 0):
            return False
        kept = {name: value for name, value in given.items() if name not in _OWN_ATTRIBUTES}
        self.changed = True
        if not _input(node, place):  # the result is not rounded
            self._write(op_type, names, node.output[0], named=True, **kept)
            return True
        result = self._write(op_type, names, f"{node.output[0]}_float", **kept)
        self._show(node.output[0], _View(result, node.input[place], _input(node, place + 1)))
        return False

    def _move(self, node: onnx.NodeProto) -> bool:
        view = self._views.get(node.input[0])
        self._bias(node)
        if view is not None and (node.op_type != "MaxPool" or len(node.output) == 1):
            moved = onnx.NodeProto()
            moved.CopyFrom(node)
            moved.input[0], moved.name = view.name, ""
            for place, name in enumerate(node.output):
                moved.output[place] = self._fresh(f"{name}_float")
                self._views[name] = view._replace(name=moved.output[place])
            self._nodes.append(moved)
        return False

    def _show(self, name: str, view: _View) -> None:
        """Note that the integers ``name`` stand for ``view``. If their range may replace a Relu, the view is clipped to it."""
        zero = self._array(view.zero) if view.zero else np.zeros((), np.uint8)
        scale = self._array(view.scale)
        if (
            self._makers.get(view.name) in _ABSORBING
            and scale is not None
            and zero is not None
            and zero.dtype.kind in "iu"
        ):
            limits = np.iinfo(zero.dtype)
            if zero.size == 1 and int(zero.reshape(())) == limits.min:
                high = float((limits.max - limits.min) * scale.reshape(()))
                view = view._replace(name=self._clip(view.name, high, scale.dtype))
        self._views[name] = view

    def _clip(self, name: str, high: float, dtype: Any) -> str:
        if self._opset < _CLIP_OPSET:
            return self._write("Clip", [name], f"{name}_clipped", min=0.0, max=high)
        bounds = [self._add(np.array(bound, dtype), f"{name}_{what}") for bound, what in ((0, "low"), (high, "high"))]
        return self._write("Clip", [name, *bounds], f"{name}_clipped")

    def _float(self, name: str, scale: str, zero: str, attributes: dict[str, Any] | None = None) -> str:
        """The float tensor for which the integers ``name`` stand; empty if it is not known."""
        view, integers, scales = self._views.get(name), self._array(name), self._array(scale)
        zeros = self._array(zero) if zero else np.zeros((), np.uint8)
        if integers is not None and scales is not None and zeros is not None:
            self.changed = True
            key = name, scale, zero, repr(attributes)
            if key not in self._floats:
                self._floats[key] = self._add(_dequantised(integers, scales, zeros, attributes or {}), f"{name}_float")
            return self._floats[key]
        if view is None or not (self._is_same(view.scale, scale) and self._is_same(view.zero, zero)):
            return ""
        self.changed = True
        return view.name

    def _is_same(self, one: str, other: str) -> bool:
        arrays = [self._array(name) for name in (one, other)]
        known = [array for array in arrays if array is not None]
        return one == other or (
            len(known) == 2 and known[0].size == known[1].size and bool((known[0] == known[1]).all())
        )

    def _zero(self, node: onnx.NodeProto, place: int) -> Array | None:
        """The constant zero point that ``node`` has as input ``place``; 0 if it is left out; None if it is computed."""
        name = _input(node, place)
        return self._array(name) if name else np.zeros((), np.uint8)

    def _array(self, name: str) -> Array | None:
        return array_of(self._constants[name]) if name in self._constants else None

    def _add(self, array: Array, like: str) -> str:
        tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), self._fresh(like))
        self._proto.graph.initializer.append(tensor)
        return str(tensor.name)

    def _write(self, op_type: str, inputs: Sequence[str], like: str, *, named: bool = False, **attributes: Any) -> str:
        """Add a node, and return the name of its result: ``like`` itself if ``named``, otherwise a new name."""
        result = like if named else self._fresh(like)
        self._nodes.append(helper.make_node(op_type, list(inputs), [result], **attributes))
        self._makers[result] = op_type
        self.changed |= named
        return result


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _scaled(weight: Array, scale: Array, is_kernel: bool) -> Array | None:
    """``weight`` with the ``scale`` of its result; None if the scale is not one number, or one per output channel."""
    flat = scale.reshape(-1)
    axis = 0 if is_kernel else weight.ndim - 1
    at = scale.ndim - (weight.ndim - 1) if is_kernel else scale.ndim - 1
    if flat.size == 1:
        return np.asarray(weight * flat[0], np.float32)
    if not 0 <= at < scale.ndim or scale.shape[at] != flat.size or flat.size != weight.shape[axis]:
        return None
    return np.asarray(weight * flat.reshape([-1 if place == axis else 1 for place in range(weight.ndim)]), np.float32)


def _dequantised(integers: Array, scale: Array, zero: Array, attributes: dict[str, Any]) -> Array:
    axis, block = attributes.get("axis", 1), attributes.get("block_size", 0)
    if block:
        cut = [slice(size) for size in integers.shape]
        scale, zero = (np.repeat(one, block, axis)[tuple(cut)] if one.ndim else one for one in (scale, zero))
    elif scale.size > 1:
        along = [-1 if at == axis % integers.ndim else 1 for at in range(integers.ndim)]
        scale, zero = (one.reshape(along) if one.size > 1 else one.reshape(()) for one in (scale, zero))
    else:
        scale, zero = scale.reshape(()), zero.reshape(-1)[:1].reshape(())
    return np.asarray((integers.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32), scale.dtype)
