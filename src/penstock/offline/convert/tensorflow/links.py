"""Links between the tensors that tf2onnx writes and the values of the source, by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from penstock.offline.convert.base import TensorLink
from penstock.tensor import Array

_LAYOUTS: Mapping[int, list[tuple[int, ...]]] = {3: [(0, 2, 1)], 4: [(0, 3, 1, 2)], 5: [(0, 4, 1, 2, 3)]}
"""The permutations with which tf2onnx moves the channels to the second axis, by rank."""


def links(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | None]], renamed: Mapping[str, str]
) -> Iterator[TensorLink]:
    """Links of all tensors of the outer graph to the values of the source that have the same name.

    ``shapes`` holds the shapes of the source's values. Where tf2onnx has moved the channels of a tensor, the link's source is the name
    and the permutation, as in ``conv:0@0,3,1,2``; ``relaid`` applies it. A link is left out if the shapes do not tell.
    """
    original = {new: old for old, new in renamed.items()}
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
    found = {info.name: _dims(info) for info in (*inferred.value_info, *inferred.output)}
    fused = dict(_fused(model.graph))
    partial = {*fused.values(), *_partial(model.graph)}
    for node in model.graph.node:
        for tensor in node.output:
            name = original.get(fused.get(tensor, tensor), fused.get(tensor, tensor))
            if tensor in partial or name not in shapes or tensor not in found:
                continue
            layout = _layout(shapes[name], found[tensor])
            if layout is not None:
                source = f"{name}@{','.join(map(str, layout))}" if layout else name
                yield TensorLink(tensor, source, layer_of(name.rpartition(":")[0] or name))


def unlinked(source: str) -> tuple[str, tuple[int, ...]]:
    """The name and the permutation (empty: none) of a link's source."""
    name, _, layout = source.partition("@")
    return name, tuple(map(int, layout.split(","))) if layout else ()


def relaid(value: Array, source: str) -> Array:
    """``value`` with the axes in the order that a link's source states."""
    layout = unlinked(source)[1]
    return np.transpose(value, layout) if len(layout) == value.ndim else value


def _layout(source: Sequence[int | None], tensor: Sequence[int | None]) -> tuple[int, ...] | None:
    """The permutation of the source's axes that gives the tensor's shape; None if it is unclear. Fixed sizes must agree exactly."""
    if len(source) != len(tensor):
        return None
    candidates = [tuple(range(len(source))), *_LAYOUTS.get(len(source), [])]
    fits = [one for one in candidates if all(_agree(source[axis], tensor[at]) for at, axis in enumerate(one))]
    exact = [one for one in fits if all((source[axis] is None) == (tensor[at] is None) for at, axis in enumerate(one))]
    clear = exact or fits
    if len(clear) != 1:
        return None
    return () if clear[0] == candidates[0] else clear[0]


def _fused(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """The activations that tf2onnx has split from an operator of TensorFlow Lite: their tensors, and the operator's before it."""
    for node in graph.node:
        if node.op_type in ("Relu", "Clip", "Tanh") and re.fullmatch(r"(Relu6?|Tanh)__\d+:0", node.output[0]):
            yield node.output[0], node.input[0]


def _partial(graph: onnx.GraphProto) -> Iterator[str]:
    """Tensors that have the name of a result, but are only part of its computation: of ``Rsqrt`` and ``SquaredDifference``."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        reads = readers.get(node.output[0], [])
        if len(reads) == 1 and node.op_type in ("Sqrt", "Sub"):
            is_square = reads[0].op_type == "Mul" and reads[0].input[0] == reads[0].input[1]
            if is_square if node.op_type == "Sub" else reads[0].op_type == "Reciprocal":
                yield node.output[0]


def _agree(left: int | None, right: int | None) -> bool:
    return left is None or right is None or left == right


def _dims(info: onnx.ValueInfoProto) -> list[int | None]:
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in info.type.tensor_type.shape.dim]


def layer_of(name: str) -> str:
    """The part of a node's name that the user knows: without the calls through which TensorFlow reaches the node."""
    return "/".join(part for part in name.split("/") if part and "PartitionedCall" not in part) or name
