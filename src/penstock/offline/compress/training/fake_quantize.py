"""Make a quantised graph trainable: FP32 master weights replace the integers, and logarithms replace the scales.

The trained graph is the graph that ONNX Runtime runs, so placement, ranges and rounding are identical. QuantizeLinear and
DequantizeLinear have straight-through gradients. The constants become functions of the trained parameters:

- A scale is its initial value times ``exp(t)``. So it stays positive, and its relative change is the change of ``t``. Shared scales
  stay shared. Zero points do not change, so zero remains an integer.
- An integer weight is ``clamp(round(w / s) + z)`` with the FP32 master ``w`` (Esser et al., "Learned Step Size Quantization", 2020).
- An INT32 bias is ``round(b / (s_x s_w))``, where ``b`` is its master, and s_x and s_w are the current scales of input and weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto

from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.training.operators.quantization import along, round_through, scaled_gradient
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.optimize.model import read_proto
from penstock.tensor import Array

_BIAS_LIMIT = 2.0**31 - 1
_REDUCED, _FULL = 64, 127


class _Constant(NamedTuple):
    """An integer initialiser, and the constants of the DequantizeLinear that reads it."""

    name: str
    scale: str
    zero_point: str
    axis: int


class FakeQuantization:
    """Hooks on the constants of ``model``, an INT8 graph in QDQ form. Before training, hooks return exactly the constants' values."""

    def __init__(
        self, model: TrainableModel, floats: Mapping[str, Array], data: Dataset, scale_rate: float = 100.0
    ) -> None:
        """``floats`` has the original FP32 weights, by the name of the integers with or without ``_quantized``. If a weight is
        missing, or does not round to the integers, the master is initialised from the integers. ``scale_rate`` is the learning rate of
        the logarithms of scales, relative to the learning rate of weights.

        Raises Unsupported if the model has no integer weights.
        """
        graph = read_proto(model.artifact).graph
        self.model, self._rate = model, scale_rate
        self._kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
        self._readers = _constants(graph, self._kinds)
        weights = [c for c in self._readers.values() if self._kinds[c.name] in (TensorProto.INT8, TensorProto.UINT8)]
        if not weights:
            raise Unsupported("the model has no integer weights", "quantise it first, in QDQ form")
        self.masters: dict[str, Any] = {}
        """FP32 parameters, by the name of the integers."""
        self.logarithms: dict[str, Any] = {}
        """Parameters, by the name of the scale."""
        self.from_floats = 0
        """The number of weights whose masters are the original floats."""
        largest = max(int(model.constant(c.name).to(torch.int32).abs().max()) for c in weights)
        # The largest element of symmetric weights reaches the end of the integer range, which may have only 7 bits.
        self._limit = _REDUCED if largest <= _REDUCED else _FULL
        for constant in weights:
            self._add_weight(constant, floats)
        self._add_activations(graph, data)
        self._add_biases(graph)

    @property
    def parameters(self) -> list[Any]:
        """All trained parameters: masters, logarithms, and weights that are still floats."""
        return [*self.masters.values(), *self.logarithms.values(), *self.model.parameters()]

    def freeze_scales(self, frozen: bool) -> None:
        for parameter in self.logarithms.values():
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None

    def _add_scale(self, name: str, elements: int, largest: int) -> None:
        if name in self.logarithms:
            return
        start = self.model.constant(name).detach().clone()
        self.logarithms[name] = logarithm = nn.Parameter(torch.zeros_like(start))
        soften = scaled_gradient(elements, largest)
        self.model.weight_hooks[name] = lambda _: start * torch.exp(self._rate * soften(logarithm))

    def _add_weight(self, constant: _Constant, floats: Mapping[str, Array]) -> None:
        model = self.model
        integers = model.constant(constant.name)
        signed = self._kinds[constant.name] == TensorProto.INT8
        low, high = (-self._limit, self._limit) if signed else (0, 255)
        scale = along(model.constant(constant.scale), integers, constant.axis)
        point = model.constant(constant.zero_point) if constant.zero_point else torch.zeros(1)
        zero = along(point, integers, constant.axis).float()
        start = (integers.float() - zero) * scale
        given = floats.get(constant.name, floats.get(constant.name.removesuffix("_quantized")))
        if given is not None and given.shape == tuple(integers.shape):
            candidate = torch.tensor(given.astype(np.float32))
            rounded = torch.clamp(torch.round(candidate / scale) + zero, low, high)
            if torch.equal(rounded, integers.float()):
                start, self.from_floats = candidate, self.from_floats + 1
        self.masters[constant.name] = master = nn.Parameter(start.clone())
        self._add_scale(constant.scale, integers.numel() // max(1, scale.numel()), high)

        def quantise(_: Tensor) -> Tensor:
            step = along(model.constant(constant.scale), master, constant.axis)
            return torch.clamp(round_through(master / step) + zero, low, high)

        model.weight_hooks[constant.name] = quantise

    def _add_activations(self, graph: onnx.GraphProto, data: Dataset) -> None:
        quantisers = [node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[1] in self._kinds]
        rows = self.model.fixed_rows or 1
        inputs = {name: torch.tensor(array) for name, array in data.rows(0, rows).items()}
        with torch.no_grad():
            values = self.model(inputs, [node.input[0] for node in quantisers])
        for node in quantisers:
            self._add_scale(node.input[1], values[node.input[0]].numel() // rows, 255)

    def _add_biases(self, graph: onnx.GraphProto) -> None:
        scale_of = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "DequantizeLinear"}
        for node in graph.node:
            bias = self._readers.get(node.input[2]) if len(node.input) > 2 else None
            if bias is None or self._kinds[bias.name] != TensorProto.INT32 or bias.name in self.masters:
                continue
            scales = [scale_of.get(name, "") for name in node.input[:2]]
            if all(scale in self.logarithms for scale in scales):
                self._add_bias(bias, scales[0], scales[1])

    def _add_bias(self, bias: _Constant, input_scale: str, weight_scale: str) -> None:
        model = self.model
        start = model.constant(bias.scale).detach().clone()
        product = (model.constant(input_scale) * model.constant(weight_scale)).detach()
        # The ratio is 1 up to rounding, except for Gemm's beta.
        factor = torch.where(torch.isclose(start, product, rtol=1e-5, atol=0.0), 1.0, start / product)
        value = model.constant(bias.name).double() * start.double()
        self.masters[bias.name] = master = nn.Parameter(value.float())

        def scale(_: Tensor) -> Tensor:
            step = (model.constant(input_scale) * model.constant(weight_scale) * factor).detach()
            return step.reshape(start.shape)

        def quantise(_: Tensor) -> Tensor:
            # Computed in FP64, because INT32 has more digits than FP32.
            return torch.clamp(round_through(master.double() / scale(start).double()), -_BIAS_LIMIT, _BIAS_LIMIT)

        model.weight_hooks[bias.scale] = scale
        model.weight_hooks[bias.name] = quantise


def _constants(graph: onnx.GraphProto, kinds: Mapping[str, int]) -> dict[str, _Constant]:
    """The integer initialisers that a DequantizeLinear reads, by the name of its output."""
    found = {}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in kinds and node.input[1] in kinds:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            zero_point = node.input[2] if len(node.input) > 2 else ""
            found[node.output[0]] = _Constant(node.input[0], node.input[1], zero_point, axis)
    return found
