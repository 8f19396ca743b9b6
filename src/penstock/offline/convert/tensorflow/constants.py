"""The constants of a frozen graph of TensorFlow, and the values that it computes from constants alone, which tf2onnx folds."""

from __future__ import annotations

from typing import Any

_MOVING = frozenset(
    {"ConcatV2", "ExpandDims", "Identity", "Pack", "Reshape", "Slice", "Snapshot", "Split", "SplitV", "Squeeze"}
    | {"StridedSlice", "Transpose", "Unpack"}
)
"""Operators that give values of their inputs unchanged."""


def fixed(graph: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the float tensors of ``graph``, a ``tf.Graph``, that depend on no input: constants and parts of them, and values
    that are computed."""
    known, stored = set[str](), set[str]()
    found: tuple[list[str], list[str]] = [], []
    for op in graph.get_operations():
        inputs = {tensor.name for tensor in op.inputs}
        is_fixed = op.type == "Const" or (inputs and inputs <= known and not op.op_def.is_stateful)
        if not is_fixed or op.control_inputs or op.type in ("Enter", "Switch", "Merge"):
            continue
        is_moved = inputs <= stored if op.type in _MOVING else not inputs
        for tensor in op.outputs:
            known.add(tensor.name)
            if is_moved:
                stored.add(tensor.name)
            if tensor.dtype.is_floating and tensor.shape.num_elements() != 1 and graph.is_fetchable(tensor):
                found[not is_moved].append(tensor.name)
    return tuple(found[0]), tuple(found[1])
