"""Conv, ConvTranspose and Gemm seen as one thing: ``y = W x + b`` for each output channel, which is axis 1 of ``y``.

Whatever scales and shifts ``y`` per channel afterwards, ``s y + t``, folds into the weights: ``W' = s W``, ``b' = s b + t``
(Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018, §3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.tensor import Array


class Linear(NamedTuple):
    """A Conv, ConvTranspose or Gemm node whose weight and bias are constants of one float type."""

    node: ir.Node
    weight: Array
    bias: Array
    """FP64, one per channel; what Gemm scales by ``beta`` is scaled already."""
    channel_view: tuple[int, ...]
    """A shape in which ``weight`` has the channels on axes of their own, to be scaled by ``per_channel``."""
    scale_view: tuple[int, ...]
    """The shape that lets one number per channel broadcast over ``channel_view``."""

    @property
    def channels(self) -> int:
        return len(self.bias)

    def per_channel(self, array: Array) -> Array | None:
        """``array``, FP64, as one number per channel if it broadcasts over ``y`` like that and leaves its shape; else None."""
        rank = self.weight.ndim
        padded = (1,) * (rank - array.ndim) + array.shape
        if len(padded) != rank or padded[1] not in (1, self.channels) or any(d != 1 for d in padded[:1] + padded[2:]):
            return None
        return np.broadcast_to(array.astype(np.float64).reshape(-1), self.channels)

    def fold(self, follower: ir.Node, scale: Array, shift: Array) -> bool:
        """Replace the node and ``follower``, its sole consumer, by one that gives ``scale * y + shift`` (FP64, per channel).

        The sums are FP64, rounded once to the weight's type. The old weights stay for whoever shares them. False, and
        nothing changed, if a folded weight is not finite.
        """
        scaled = self.weight.reshape(self.channel_view).astype(np.float64) * scale.reshape(self.scale_view)
        with np.errstate(over="ignore"):  # out of range for FP16: looked for below
            weight = scaled.reshape(self.weight.shape).astype(self.weight.dtype)
            bias = (self.bias * scale + shift).astype(self.weight.dtype)
        if not (_finite(weight) and _finite(bias)):
            return False
        owner, weight_value = self.node.graph, self.node.inputs[1]
        assert isinstance(owner, ir.Graph)
        assert weight_value is not None
        inputs = [
            self.node.inputs[0],
            graph.add_constant(owner, weight, f"{weight_value.name}"),
            graph.add_constant(owner, bias, f"{weight_value.name}_bias"),
        ]
        attributes = [attribute for name, attribute in self.node.attributes.items() if name != "beta"]
        graph.replace_pair(self.node, follower, self.node.op_type, inputs, attributes)
        return True


def read_linear(node: ir.Node | None) -> Linear | None:
    """``node`` as a Linear; None if it is another operator, or its weight or bias is not constant."""
    if node is None or node.domain != "" or node.op_type not in _VIEWS:
        return None
    weight, bias_input = graph.constant(graph.input_of(node, 1)), graph.input_of(node, 2)
    weight_value = node.inputs[1]
    if weight is None or weight_value is None or weight_value.dtype not in graph.FLOATS or weight.ndim < 2:
        return None
    channel_view, scale_view, channels = _VIEWS[node.op_type](node, weight.shape)
    bias = np.zeros(channels)
    if bias_input is not None:
        array = graph.constant(bias_input)
        # Gemm may be given one bias per row; that is not one per channel.
        if array is None or (array.size != 1 and (array.size != channels or array.shape[-1] != channels)):
            return None
        beta = graph.float_attribute(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0
        bias = np.broadcast_to(array.astype(np.float64).reshape(-1) * beta, channels)
    return Linear(node, weight, bias, channel_view, scale_view)


def _conv_views(_node: ir.Node, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return shape, (shape[0], *(1 for _ in shape[1:])), shape[0]


def _conv_transpose_views(node: ir.Node, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    # The weight is [inputs, channels / groups, ...]: channels of all groups lie along two axes.
    groups = graph.int_attribute(node, "group", 1)
    view = (groups, shape[0] // groups, *shape[1:])
    return view, (groups, 1, shape[1], *(1 for _ in shape[2:])), groups * shape[1]


def _gemm_views(node: ir.Node, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if graph.int_attribute(node, "transB", 0):
        return shape, (shape[0], 1), shape[0]
    return shape, (1, shape[1]), shape[1]


_VIEWS = {"Conv": _conv_views, "ConvTranspose": _conv_transpose_views, "Gemm": _gemm_views}


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())
