"""Undo the storage of weights as integers: the integers, as floats, become the weights divided by their scales.

The operators that multiply with the scales remain in the result, so a wrong connection changes its outputs. The integers are computed
by the model's own operators, those of a table for every row, and must be the rounded weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.artifact import Artifact
from penstock.errors import PenstockError, WrongResult
from penstock.offline.compress.restored.unrounded import FIX, Integers, wrong_weight
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames
from penstock.offline.sessions import loaded
from penstock.tensor import Array

_TINY = np.finfo(np.float32).tiny


def unstored(made: onnx.ModelProto, source: Artifact, layers: Mapping[str, Mapping[str, Any]]) -> onnx.ModelProto:
    """Give ``made``, a version of ``source`` with stored weights, the exact weights. ``layers`` are the facts of the step. Raises
    WrongResult if the integers are no rounded weights.
    """
    weights = {tensor.name: tensor for tensor in read_proto(source).graph.initializer}
    proto = onnx.ModelProto()
    proto.CopyFrom(made)
    graph, fresh = proto.graph, FreshNames(proto.graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}
    for name, facts in layers.items():
        weight, scale = (numpy_helper.to_array(one) for one in (weights[name], tensors[facts["scale"]]))
        for value in facts["floats"]:
            chain = [graph.node[place] for place in sorted(_chain(graph, places, value))]
            gather = next((node for node in chain if node.op_type == "Gather"), None)
            integers = _values(proto, chain, value, len(weight))
            exact = _exact(name, weight, integers, scale, facts["bits"])
            tensor = fresh(f"{value}_exact")
            graph.initializer.append(numpy_helper.from_array(exact, tensor))
            node = helper.make_node("Identity", [tensor], [value])
            if gather is not None:
                node = helper.make_node("Gather", [tensor, gather.input[1]], [value])
            graph.node[places[value]].CopyFrom(node)
    return proto


def _exact(name: str, weight: Array, integers: Array, scale: Array, bits: int) -> Array:
    """``weight`` in steps, in the shape of ``integers``."""
    if integers.size != weight.size or not np.array_equal(integers, np.rint(integers)):
        raise wrong_weight(name)
    weight, scale = weight.reshape(integers.shape), np.where(scale == 0, _TINY, scale)
    high = 1 << (bits - 1)
    rounded = Integers(integers.astype(np.int8), scale, np.zeros((), np.int8), (-high, high - 1))
    if not rounded.fits(weight):
        raise wrong_weight(name)
    if rounded.is_coarse(weight).any():
        raise WrongResult(f"the steps of weight '{name}' of the compressed model are too large for its values", FIX)
    return np.asarray(weight / scale, np.float32)


def _chain(graph: onnx.GraphProto, places: Mapping[str, int], value: str) -> set[int]:
    """The places of the nodes that compute ``value`` from integers, without those that compute the ids of a Gather."""
    waiting, found = [value], set[int]()
    while waiting:
        place = places.get(waiting.pop())
        if place is not None and place not in found:
            found.add(place)
            node = graph.node[place]
            waiting += node.input[:1] if node.op_type == "Gather" else node.input
    return found


def _values(made: onnx.ModelProto, chain: Sequence[onnx.NodeProto], value: str, rows: int) -> Array:
    """The value that ``chain`` computes, for the ids of all rows of a table."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in chain]
    for node in nodes:
        if node.op_type == "Gather":
            node.input[1] = "all rows"
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "integers",
        [helper.make_tensor_value_info("all rows", onnx.TensorProto.INT64, [rows])],
        [helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None)],
        [tensor for tensor in made.graph.initializer if tensor.name in read],
    )
    model = helper.make_model(graph, opset_imports=made.opset_import, ir_version=made.ir_version)
    try:
        with loaded(
            Artifact.from_bytes(bytes(model.SerializeToString(deterministic=True))), as_written=True
        ) as running:
            return running.forward({"all rows": np.arange(rows)})[value]
    except PenstockError as error:
        raise WrongResult(f"the weights of the compressed model cannot be restored: {error.message}", FIX) from error
