"""Dead neurons taken out: those that nothing reaches, and those whose answer nobody reads. What pruning left becomes structure.

A channel between two linear layers (``pairs.py``) is dead

- if all its outgoing weights are zero: it is cut;
- if all its incoming weights are zero: it is a constant, what the operators between make of its bias; that times its
  outgoing weights moves into the next bias, and it is cut. Where the next layer pads with zeros the constant would not be one
  at the border, so only a channel that is zero goes.

Cutting one layer may leave dead neurons in the one before, so this goes on until nothing changes. One channel always stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.compress.pruning.magnitude import write_weights
from penstock.offline.compress.pruning.pairs import POOLING, Pair, array_of, find_pairs
from penstock.offline.optimize import graph
from penstock.offline.optimize.model import infer_shapes, read_proto, to_bytes
from penstock.offline.optimize.verify import Verifier
from penstock.offline.sessions import loaded
from penstock.tensor import Array


def remove_dead_neurons(artifact: Artifact, samples: Sequence[Mapping[str, Array]] = ()) -> Artifact:
    """``artifact`` without its dead neurons: the same answers, up to the order of sums, from smaller matrices.

    The answers are compared in ONNX Runtime on generated inputs and on up to 8 of ``samples``; ``max_relative_error`` among
    the facts is the largest difference, None if the model runs on nothing that could be made up. A model without dead neurons
    comes back as it was, with the facts. BatchNormalization between layers hides them: fold it first (``optimize``).
    Raises InvalidModel, Unsupported if the model cannot be read, PenstockError if the answers changed.
    """
    model = infer_shapes(read_proto(artifact))
    widths = _widths(model)
    while sum(_shrink(pair, model) for pair in find_pairs(model)):
        pass
    left = _widths(model)
    layers = {name: {"channels": widths[name], "removed": widths[name] - left[name]} for name in widths}
    facts: dict[str, Any] = {"removed": sum(layer["removed"] for layer in layers.values()), "layers": layers}
    if not facts["removed"]:
        return artifact.derive(artifact.data, "remove_dead_neurons", {}, facts)
    data = to_bytes(model)
    verifier = Verifier(artifact, samples)
    verdict = verifier.check(data)
    if verdict.failure and not verifier.obstacle:
        raise PenstockError(f"removing dead neurons changed the answers: {verdict.failure}")
    return artifact.derive(data, "remove_dead_neurons", {}, {**facts, "max_relative_error": verdict.max_relative_error})


def _shrink(pair: Pair, model: ir.Model) -> int:
    """Cut the dead channels of one pair; how many they were."""
    incoming, outgoing = pair.first.weights(), pair.second.weights()
    channels = len(incoming)
    unread: Array = (outgoing.reshape(outgoing.shape[0], channels, -1) == 0).all(axis=(0, 2))
    constant: Array = (incoming == 0).all(axis=(1, 2)) & ~unread
    values = _constants(pair, model) if constant.any() else np.zeros(channels)
    dead = unread | (constant & (values == 0))
    folded = constant & ~dead & np.isfinite(values)
    if (dead | folded).all():
        dead[0] = folded[0] = False
    if folded.any() and _fold(pair, np.where(folded, values, 0.0), model):
        dead |= folded
    if dead.any():
        pair.select(model, np.flatnonzero(~dead))
    return int(dead.sum())


def _fold(pair: Pair, values: Array, model: ir.Model) -> bool:
    """Move constant channels into the next bias; False, and nothing changed, if that cannot be."""
    second = pair.second
    if second.is_convolution and not _is_unpadded(second.node):
        return False
    if second.bias is None and second.node.op_type == "MatMul":
        return False
    weights = second.weights().astype(np.float64).sum(axis=2)
    biases = second.biases()
    moved = (biases.astype(np.float64) + weights @ np.repeat(values, pair.repeat)).astype(biases.dtype)
    if not np.isfinite(moved.astype(np.float64)).all():
        return False
    if second.bias is None:
        second.node.resize_inputs(3)
        second.node.replace_input_with(2, graph.add_constant(model.graph, moved, f"{second.weight.name}_bias"))
    else:
        write_weights(model, {str(second.bias.name): moved.reshape(array_of(second.bias).shape)})
    return True


def _is_unpadded(node: ir.Node) -> bool:
    padding = node.attributes.get("auto_pad")
    automatic = padding is not None and padding.as_string() not in ("NOTSET", "VALID")
    return node.op_type == "Conv" and not automatic and not any(graph.ints_attribute(node, "pads") or ())


def _constants(pair: Pair, model: ir.Model) -> Array:
    """FP64: what each channel is after the operators between if nothing comes in, by running these on the biases; NaN if the
    engine cannot."""
    biases = pair.first.biases()
    if not pair.between:
        return biases.astype(np.float64)
    positions = (1,) * (array_of(pair.first.weight).ndim - 2)
    proto = _between(pair, model)
    try:
        with loaded(Artifact.from_bytes(proto.SerializeToString()), as_written=True) as model_between:
            inputs = {proto.graph.input[0].name: biases.reshape(1, -1, *positions)}
            (result,) = model_between.forward(inputs).values()
    except PenstockError:
        return np.full(len(biases), np.nan)
    return result.astype(np.float64).reshape(-1)


def _between(pair: Pair, model: ir.Model) -> onnx.ModelProto:
    """The operators between as a model of their own, for one value per channel."""
    nodes = [ir.to_proto(node) for node in pair.between]
    for node in nodes:
        if node.op_type in POOLING:  # of a constant it is that constant
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output))
    numbers = {value: graph.constant(value) for node in pair.between for value in node.inputs}
    tensors = [
        ir.to_proto(ir.Tensor(array, name=value.name, dtype=value.dtype))
        for value, array in numbers.items()
        if value is not None and array is not None
    ]
    start, end = pair.first.output, pair.between[-1].outputs[0]
    assert start.dtype is not None
    feed = onnx.helper.make_tensor_value_info(start.name, start.dtype, None)
    body = onnx.helper.make_graph(nodes, "between", [feed], [onnx.ValueInfoProto(name=end.name)], tensors)
    opsets = [onnx.helper.make_opsetid("", graph.opset(model))]
    return onnx.helper.make_model(body, opset_imports=opsets, ir_version=model.ir_version)


def _widths(model: ir.Model) -> dict[str, int]:
    """Channels between each pair, by the weight that makes them."""
    return {str(pair.first.weight.name): len(pair.first.weights()) for pair in find_pairs(model)}
