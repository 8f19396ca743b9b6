"""Undo the storage of weights as integers: verify the numbers that the model restores, and put the exact ones in their place.

The model's own operators compute the numbers, those of a table for every row. They must be multiples of the scales, and the rounded
weights. The result then computes with exactly the numbers of the original, so even models that round activations give equal outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from penstock.artifact import Artifact
from penstock.errors import PenstockError, WrongResult
from penstock.offline.compress.restored.unrounded import FIX, Integers, wrong_weight
from penstock.offline.optimize.mapped import array_of, artifact_of, row_slices, tensor_of
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
    graph, fresh = made.graph, FreshNames(made.graph)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}
    for name, facts in layers.items():
        weight, scale = (array_of(one) for one in (weights[name], tensors[facts["scale"]]))
        for value in facts["restored"]:
            chain = [graph.node[place] for place in sorted(_chain(graph, places, value))]
            ids = {node.input[1] for node in chain if node.op_type == "Gather"}
            for rows, numbers in _values(made, chain, value, weight):
                if numbers.size != weight[rows].size or len(ids) > 1:
                    raise wrong_weight(name)
                steps = scale[rows] if ids else scale
                _check(name, weight[rows].reshape(numbers.shape), numbers, steps, facts["bits"])
                shape = len(weight) if ids else len(numbers), *numbers.shape[1:]
            tensor = fresh(f"{value}_exact")
            graph.initializer.append(tensor_of(weight.reshape(shape), tensor))
            kind = "Gather" if ids else "Identity"
            graph.node[places[value]].CopyFrom(helper.make_node(kind, [tensor, *ids], [value]))
    return made


def _check(name: str, weight: Array, numbers: Array, scale: Array, bits: int) -> None:
    """Raise WrongResult unless ``numbers`` are ``weight``, rounded to multiples of ``scale``."""
    scale, high = np.where(scale == 0, _TINY, scale), 1 << (bits - 1)
    integers = np.rint(numbers / scale)
    if (
        not np.allclose(integers * scale, numbers, rtol=1e-6, atol=0)
        or not -high <= integers.min() <= integers.max() < high
    ):
        raise wrong_weight(name)
    rounded = Integers(integers.astype(np.int8), scale, np.zeros((), np.int8), (-high, high - 1))
    if not rounded.fits(weight):
        raise wrong_weight(name)
    if rounded.is_coarse(weight).any():
        raise WrongResult(f"the steps of weight '{name}' of the compressed model are too large for its values", FIX)


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


def _values(
    made: onnx.ModelProto, chain: Sequence[onnx.NodeProto], value: str, weight: Array
) -> Iterator[tuple[slice, Array]]:
    """The value that ``chain`` computes for ``weight``. If ``weight`` is a table, its rows are computed in parts."""
    is_table = any(node.op_type == "Gather" for node in chain)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in chain]
    for node in nodes:
        if node.op_type == "Gather":
            node.input[1] = "all rows"
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "integers",
        [helper.make_tensor_value_info("all rows", onnx.TensorProto.INT64, [None])],
        [helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None)],
        [tensor for tensor in made.graph.initializer if tensor.name in read],
    )
    model = helper.make_model(graph, opset_imports=made.opset_import, ir_version=made.ir_version)
    try:
        with loaded(artifact_of(model), as_written=True) as running:
            for rows in row_slices(weight) if is_table else [slice(len(weight))]:
                yield rows, running.forward({"all rows": np.arange(len(weight))[rows]})[value]
    except PenstockError as error:
        raise WrongResult(f"the weights of the compressed model cannot be restored: {error.message}", FIX) from error
