"""Write the QDQ form of a model: QuantizeLinear and DequantizeLinear around the operators that become integer.

If an integer operator computes a tensor t, all readers of t receive the rounded tensor. If t is an input or the result of a float
operator, only integer operators receive the rounded tensor::

    integer operator ── t_QuantizeLinear_Input ── QuantizeLinear ── DequantizeLinear ── t
    float operator ── t ── QuantizeLinear ── DequantizeLinear ── t_DequantizeLinear_Output

Weights and biases are dequantised separately for each operator, so operators with different channel axes can share a weight. New
tensors have unused names. The order of nodes is preserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.offline.compress.ptq.qdq_placement import (
    LINEAR_OPS,
    FloatModel,
    QdqPlacement,
    output_axis,
)
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.rounding import Rounding
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.linear import CONVOLUTIONS
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array

_BIAS_LIMIT = 2**30
"""Largest magnitude of an integer bias. It leaves half of INT32 to the sum of the products."""
_LARGEST_BIAS = _BIAS_LIMIT * (1 - 2**-20)
"""Magnitude that scales are chosen for, so that rounding the scales to FP32 leaves every bias below the limit."""
_BIAS_STEPS = 2**23
"""Number of steps from zero to the bias of a channel whose weights are all zero; as many as FP32 can distinguish."""


def write_qdq(
    model: FloatModel,
    nodes: Sequence[onnx.NodeProto],
    ranges: Mapping[str, Range],
    scheme: IntegerScheme,
    placement: QdqPlacement,
) -> onnx.ModelProto:
    """Return ``model`` with ``nodes`` in integers. ``ranges`` must contain every tensor that is rounded."""
    return _Writer(model, nodes, ranges, scheme, placement).write()


class _Rounded(NamedTuple):
    """The constants that round one tensor."""

    scale_name: str
    zero_name: str
    scale: np.float32


class _Writer:
    def __init__(
        self,
        model: FloatModel,
        nodes: Sequence[onnx.NodeProto],
        ranges: Mapping[str, Range],
        scheme: IntegerScheme,
        placement: QdqPlacement,
    ) -> None:
        self._model, self._ranges, self._scheme = model, ranges, scheme
        self._rounding = Rounding(model, nodes, placement, clips_exactly=not scheme.symmetric)
        self._integer = {node.name for node in nodes}
        self._fresh = FreshNames(model.proto.graph)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._parameters: dict[str, _Rounded] = {}
        """By tensor."""
        self._rounded: dict[str, str] = {}
        """The rounded versions of inputs and of tensors that float operators compute."""
        self._dequantised: dict[tuple[str, bytes], str] = {}
        """The name of the tensor that dequantises each constant, by the constant's name and its parameters."""

    def write(self) -> onnx.ModelProto:
        rounding = self._rounding
        moved = rounding.moved_into_subgraphs()
        self._round_for_integers(self._model.input_names)
        for node in self._model.nodes:
            if node.name in rounding.removed:
                continue
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if node.name in self._integer:
                self._replace_inputs(copy)
            self._nodes.append(copy)
            if node.name not in self._integer or not moved.isdisjoint(node.output):
                self._round_for_integers(node.output)
                continue
            for place, name in enumerate(node.output):
                shown = rounding.absorbed.get(name, name)
                if shown in rounding.sources:
                    copy.output[place] = self._fresh(f"{shown}_QuantizeLinear_Input")
                    self._round(shown, copy.output[place], shown)
        return self._proto()

    def _proto(self) -> onnx.ModelProto:
        proto = onnx.ModelProto()
        proto.CopyFrom(self._model.proto)
        used = set(self._model.output_names).union(*map(reads, self._nodes))
        kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
        for field, values in (("node", self._nodes), ("initializer", [*kept, *self._constants]), ("value_info", [])):
            proto.graph.ClearField(field)
            getattr(proto.graph, field).extend(values)
        return proto

    def _round_for_integers(self, tensors: Iterable[str]) -> None:
        for name in filter(self._rounding.sources.__contains__, tensors):
            self._rounded[name] = self._fresh(f"{name}_DequantizeLinear_Output")
            self._round(name, name, self._rounded[name])

    def _round(self, tensor: str, before: str, after: str) -> None:
        """Round ``before``, the values of ``tensor``, into ``after``."""
        found = self._activation(self._rounding.sources[tensor])
        integers = self._fresh(f"{tensor}_QuantizeLinear_Output")
        for op_type, source, result in (("QuantizeLinear", before, integers), ("DequantizeLinear", integers, after)):
            inputs = [source, found.scale_name, found.zero_name]
            self._nodes.append(helper.make_node(op_type, inputs, [result], f"{tensor}_{op_type}"))

    def _activation(self, tensor: str) -> _Rounded:
        if tensor not in self._parameters:
            self._parameters[tensor] = self._add_activation(tensor, self._ranges[tensor])
        return self._parameters[tensor]

    def _add_activation(self, tensor: str, range: Range) -> _Rounded:
        scale, zero = self._scheme.parameters(np.array(range.low), np.array(range.high))
        rounded = np.float32(scale)
        names = self._add(np.asarray(rounded), f"{tensor}_scale"), self._add(self._zero(zero), f"{tensor}_zero_point")
        return _Rounded(*names, rounded)

    def _zero(self, zero: Array) -> Array:
        return np.asarray(zero, self._scheme.activation.dtype)

    def _replace_inputs(self, node: onnx.NodeProto) -> None:
        weights = self._model.weights
        names = list(node.input)
        for place, name in enumerate(names):
            if name in self._rounded:
                node.input[place] = self._rounded[name]
            elif name in weights and place in self._rounding.constant_inputs(node):
                node.input[place] = self._constant(name)
        if node.op_type in LINEAR_OPS and names[1] in weights:
            self._replace_weights(node, names)

    def _replace_weights(self, node: onnx.NodeProto, names: Sequence[str]) -> None:
        """Quantise the weight, with one scale per output channel, and the bias, with the scale of the product. A stack of matrices has
        one scale, because integer kernels take no more.
        """
        weight, limit = self._array(names[1]), self._scheme.weight_limit
        is_stack = node.op_type == "MatMul" and weight.ndim > 2
        axis = None if is_stack or (self._scheme.per_tensor and node.op_type not in CONVOLUTIONS) else output_axis(node)
        bias = self._array(names[2]) if len(names) > 2 and names[2] else None
        step = self._activation(self._rounding.sources[names[0]]).scale
        scales = weight_scales(weight, axis, limit, bias, float(step))
        along = scales.reshape([-1 if at == axis else 1 for at in range(weight.ndim)])
        integers = np.clip(np.round(weight / along), -limit, limit).astype(self._scheme.weight.dtype)
        node.input[1] = self._dequantise(names[1], integers, scales, axis)
        if bias is not None:
            products = step * scales
            values = np.clip(np.round(bias / products.astype(np.float64)), -_BIAS_LIMIT, _BIAS_LIMIT)
            along_bias = None if axis is None else 0
            node.input[2] = self._dequantise(names[2], values.astype(np.int32), products, along_bias)

    def _constant(self, name: str) -> str:
        """A constant operand of an operator that is not linear, quantised like an activation."""
        array = self._array(name).astype(np.float64)
        ends = np.array(min(0.0, array.min(initial=0.0))), np.array(max(0.0, array.max(initial=0.0)))
        scale, zero = self._scheme.parameters(*ends)
        integers = np.clip(np.round(array / scale) + zero, *self._scheme.activation_limits)
        return self._dequantise(name, self._zero(integers), np.asarray(scale, np.float32), None, self._zero(zero))

    def _dequantise(self, name: str, integers: Array, scale: Array, axis: int | None, zero: Array | None = None) -> str:
        """The tensor that dequantises the constant ``name``. Nodes that need the same integers share it."""
        key = name, b"".join([f"{axis} {integers.dtype} ".encode(), scale.tobytes(), integers.tobytes()])
        if key not in self._dequantised:
            suffix = "_quantized_scale" if integers.dtype == np.int32 else "_scale"
            zero = np.zeros(scale.shape, integers.dtype) if zero is None else zero
            parts = (integers, f"{name}_quantized"), (scale, f"{name}{suffix}"), (zero, f"{name}_zero_point")
            result = self._dequantised[key] = self._fresh(f"{name}_DequantizeLinear_Output")
            inputs = [self._add(*part) for part in parts]
            self._nodes.append(
                helper.make_node("DequantizeLinear", inputs, [result], f"{result}_node", **_axis_attribute(axis))
            )
        return self._dequantised[key]

    def _array(self, name: str) -> Array:
        return array_of(self._model.weights[name])

    def _add(self, array: Array, name: str) -> str:
        tensor = numpy_helper.from_array(array, self._fresh(name))
        self._constants.append(tensor)
        return str(tensor.name)


def _axis_attribute(axis: int | None) -> dict[str, int]:
    return {} if axis is None else {"axis": axis}


def weight_scales(weight: Array, axis: int | None, limit: int, bias: Array | None, step: float) -> Array:
    """The FP32 scale of each output channel of ``weight``, or of the whole weight if ``axis`` is None: the largest magnitude divided
    by ``limit``.

    The scale of a bias is the product of the channel's scale and ``step``, the scale of the input. If the integer bias would exceed
    its limit, the channel's scale is increased. If all weights of a channel are zero, the bias determines the scale.
    """
    if axis is None:
        largest = None if bias is None else np.abs(bias).max(keepdims=True, initial=0.0)
        return weight_scales(weight.reshape(1, -1), 0, limit, largest, step).reshape(())
    channels = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float64)
    scales = np.abs(channels).max(axis=1, initial=0.0) / limit
    magnitudes = np.zeros(len(scales)) if bias is None else np.abs(bias.astype(np.float64)) / step
    scales = np.where(scales > 0, np.maximum(scales, magnitudes / _LARGEST_BIAS), magnitudes / _BIAS_STEPS)
    rounded = scales.astype(np.float32)
    return np.asarray(np.where(rounded < np.finfo(np.float32).tiny, np.float32(1), rounded))
