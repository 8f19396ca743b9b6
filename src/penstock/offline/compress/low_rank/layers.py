"""Find the layers of a graph that can be split, replace them, and time them in isolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import SizedCall
from penstock.offline.compress.low_rank.convolution import SplitForm, Way, factor_shapes
from penstock.offline.compress.low_rank.matrix import Split
from penstock.offline.judge.race import race
from penstock.offline.optimize import graph
from penstock.offline.optimize.linear import form_of, read_linear
from penstock.offline.optimize.model import to_artifact
from penstock.offline.optimize.names import FreshNames
from penstock.tensor import Array

_NARROW = 64
"""Splitting a 1×1 convolution with fewer channels than this saves no time."""
_OPSET = 17
_SECONDS_EACH = 0.06
"""Seconds for timing one way to run a layer."""


class SplittableLayer(NamedTuple):
    """A Gemm, MatMul or Conv with constant FP32 weights."""

    node: ir.Node
    weight: Array
    """FP32, (outputs, inputs, *kernel)."""
    bias: Array | None
    """FP64, one per channel; None if the node cannot have a bias."""

    @property
    def name(self) -> str:
        """The name of the output tensor."""
        return f"{self.node.outputs[0].name}"

    @property
    def source(self) -> str:
        """The name of the input tensor."""
        value = self.node.inputs[0]
        return f"{value.name if value else ''}"

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(self.weight.shape[2:])

    @property
    def axis(self) -> int:
        """The axis of the channels in the input and the output."""
        return 1 if self.kernel else -1


def layers(model: ir.Model) -> list[SplittableLayer]:
    """The layers that can be split, in graph order.

    Excludes grouped convolutions, 1×1 convolutions on few channels, and weights with a single row or column.
    """
    found = (_read_layer(node) for node in graph.plain_nodes(model))
    return [layer for layer in found if layer is not None]


def _read_layer(node: ir.Node) -> SplittableLayer | None:
    value = graph.input_of(node, 1)
    weight = graph.constant(value)
    if weight is None or value is None or value.dtype != ir.DataType.FLOAT or graph.is_constant(node.inputs[0]):
        return None
    if weight.ndim < 2 or min(weight.shape[:2]) < 2:
        return None
    if node.op_type == "MatMul":
        return SplittableLayer(node, weight.T, None) if weight.ndim == 2 else None
    linear, form = read_linear(node), form_of(node)
    if linear is None or form is None or form.transposes_input or form.groups != 1:
        return None
    if node.op_type == "Gemm":
        return SplittableLayer(node, np.moveaxis(weight, form.outputs, 0) * np.float32(form.alpha), linear.bias)
    narrow = math.prod(weight.shape[2:]) == 1 and min(weight.shape[:2]) < _NARROW
    return SplittableLayer(node, weight, linear.bias) if node.op_type == "Conv" and not narrow else None


def replace(layer: SplittableLayer, form: SplitForm | None, split: Split) -> None:
    """Replace ``layer`` in its graph by the factors in ``split``. If ``form`` is None, the single factor replaces the weight."""
    owner = layer.node.graph
    assert isinstance(owner, ir.Graph)
    source, *constants = layer.node.inputs
    assert source is not None
    graph.replace_by_nodes(layer.node, _chain(owner, layer, form, split, source))
    for value in filter(None, constants):
        if value.is_initializer() and not graph.is_used(value):
            owner.initializers.pop(f"{value.name}", None)


def alone(layer: SplittableLayer, form: SplitForm | None, factors: Sequence[Array], shape: Sequence[int]) -> Artifact:
    """A model that consists only of ``layer``, split into ``factors`` or unsplit. Its input x has ``shape``, and its output is y."""
    rank = len(layer.weight.shape) if layer.kernel else len(shape)
    source = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(list(shape)))
    owner = ir.Graph([source], [], nodes=[], opset_imports={"": _OPSET}, name="layer")
    nodes = _chain(owner, layer, form, Split(tuple(factors)), source)
    owner.extend(nodes)
    result = nodes[-1].outputs[0]
    result.name, result.type, result.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([None] * rank)
    owner.outputs.append(result)
    return to_artifact(ir.Model(owner, ir_version=8))


def measure(layer: SplittableLayer, shape: Sequence[int], ways: Sequence[Way], threads: int) -> dict[Way, float]:
    """The median time in milliseconds of every way to run ``layer`` alone on an input of ``shape``. Calls are interleaved.

    Weights are random, since time does not depend on the values.
    """

    def random(shape: Sequence[int]) -> Array:
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    models = {
        way: alone(layer, way[0], [random(factor) for factor in factor_shapes(layer.weight.shape, *way)], shape)
        for way in ways
    }
    timings = race(models, [SizedCall({"x": random(shape)})], _SECONDS_EACH * len(models), threads, loads=1)
    return {way: timed.p50_ms for way, timed in timings.items()}


def _chain(
    owner: ir.Graph, layer: SplittableLayer, form: SplitForm | None, split: Split, source: ir.Value
) -> list[ir.Node]:
    """Nodes that apply the factors to ``source`` in turn, the last one with the bias. Their constants are added to ``owner``."""
    bias = layer.bias if split.shift is None or layer.bias is None else layer.bias + split.shift
    nodes: list[ir.Node] = []
    fresh = FreshNames(owner)
    for number, (factor, owned) in enumerate(zip(split.factors, _owned(form, layer.kernel), strict=True)):
        array = factor if layer.kernel else factor.T
        inputs = [source, graph.add_constant(owner, array.astype(np.float32), f"{layer.name}_factor{number}")]
        if number == len(split.factors) - 1 and bias is not None and bias.any():
            inputs.append(graph.add_constant(owner, bias.astype(np.float32), f"{layer.name}_bias"))
        attributes = _attributes(layer.node, factor.shape[2:], owned) if layer.kernel else []
        node = ir.Node("", layer.node.op_type, inputs, attributes, num_outputs=1, name=f"{layer.name}_factor{number}")
        source = node.outputs[0]
        source.name = fresh(f"{inputs[1].name}_result")
        nodes.append(node)
    return nodes


def _owned(form: SplitForm | None, kernel: tuple[int, ...]) -> list[frozenset[int]]:
    """For each factor, the kernel axes whose strides, pads and dilations it applies."""
    everything, nothing = frozenset(range(len(kernel))), frozenset[int]()
    return {
        None: [everything],
        SplitForm.CHANNEL: [everything, nothing],
        SplitForm.SPATIAL: [frozenset({0}), frozenset({1})],
        SplitForm.TUCKER: [nothing, everything, nothing],
    }[form]


def _attributes(node: ir.Node, kernel: tuple[int, ...], owned: frozenset[int]) -> list[ir.Attr]:
    rank = len(kernel)

    def along(name: str, default: int, times: int = 1) -> ir.Attr:
        given = graph.ints_attribute(node, name) or [default] * (rank * times)
        return ir.AttrInt64s(name, [number if at % rank in owned else default for at, number in enumerate(given)])

    attributes = [ir.AttrInt64s("kernel_shape", list(kernel)), along("strides", 1), along("dilations", 1)]
    auto = node.attributes.get("auto_pad")
    if auto is None or auto.as_string() == "NOTSET":
        return [*attributes, along("pads", 0, times=2)]
    # auto_pad has no effect along an axis with kernel size 1 and stride 1.
    return [*attributes, ir.AttrString("auto_pad", auto.as_string())]
