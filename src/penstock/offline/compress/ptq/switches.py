"""A float model in which any one tensor can be rounded, with any scale: one session for all of them.

Behind each tensor stands an ``If`` that rounds it only when its number is fed::

    t ── If(Equal(which, 3)) ── then: DequantizeLinear(QuantizeLinear(t, scale, zero))   else: t ── …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper

from penstock.engines.base import LoadedModel
from penstock.offline.compress.ptq.histogram import Range
from penstock.offline.compress.ptq.placement import FloatModel
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

SWITCHES = ("penstock_which", "penstock_scale", "penstock_zero")
"""Inputs that are added: the tensor's number, the scale and the zero point."""
OFF = -1
"""The number of no tensor."""


class SwitchedModel:
    """A model ``with_switches`` to those who know only its own inputs: the switches are fed with what was set last."""

    reentrant = False

    def __init__(self, model: LoadedModel, scheme: IntegerScheme) -> None:
        self._model, self._scheme = model, scheme
        inputs = tuple(spec for spec in model.signature.inputs if spec.name not in SWITCHES)
        self.signature = msgspec.structs.replace(model.signature, inputs=inputs)
        self._fed: dict[str, Array] = {}

    def set(self, which: int, range: Range) -> None:
        scale, zero = self._scheme.parameters(np.array(range.low), np.array(range.high))
        values = (np.int64(which), np.float32(scale), self._scheme.activation.dtype.type(zero))
        self._fed = {name: np.asarray(value) for name, value in zip(SWITCHES, values, strict=True)}

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._model.forward({**inputs, **self._fed})

    def unload(self) -> None:
        self._model.unload()


def with_switches(model: FloatModel, numbers: Mapping[str, int], scheme: IntegerScheme) -> onnx.ModelProto:
    """The float model with an ``If`` behind each tensor of ``numbers``, which rounds it when its number is fed.

    Scalar inputs are added: the number (int64; one that is no tensor's leaves the model as it was), the scale and the zero point.
    """
    which, scale, zero = SWITCHES
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    del graph.node[:], graph.value_info[:]
    for name, datatype in ((which, DataType.INT64), (scale, DataType.FP32), (zero, scheme.activation)):
        graph.input.append(helper.make_tensor_value_info(name, datatype.onnx, []))
    new_names = {tensor: f"{tensor}_penstock_rounded" for tensor in numbers}

    def add_switch(tensor: str) -> None:
        number = f"{tensor}_penstock_number"
        graph.initializer.append(helper.make_tensor(number, DataType.INT64.onnx, [], [numbers[tensor]]))
        graph.node.append(helper.make_node("Equal", [which, number], [f"{number}_equal"]))
        graph.node.append(_switch(tensor, new_names[tensor], f"{number}_equal"))

    for name in model.input_names:
        if name in numbers:
            add_switch(name)
    for node in model.nodes:
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.input[:] = [new_names.get(name, name) for name in node.input]
        for name in node.output:
            if name in numbers:
                add_switch(name)
    return proto


def _switch(tensor: str, output: str, condition: str) -> onnx.NodeProto:
    _, scale, zero = SWITCHES
    rounded, kept = f"{output}_then", f"{output}_else"
    branches: dict[str, Any] = {
        "then_branch": (
            [
                helper.make_node("QuantizeLinear", [tensor, scale, zero], [f"{output}_integer"]),
                helper.make_node("DequantizeLinear", [f"{output}_integer", scale, zero], [rounded]),
            ],
            rounded,
        ),
        "else_branch": ([helper.make_node("Identity", [tensor], [kept])], kept),
    }
    graphs = {
        name: helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(result, DataType.FP32.onnx, None)])
        for name, (nodes, result) in branches.items()
    }
    return helper.make_node("If", [condition], [output], name=f"{output}_if", **graphs)
