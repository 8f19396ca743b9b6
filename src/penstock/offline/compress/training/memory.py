"""The memory that training a model needs, estimated before it begins."""

from __future__ import annotations

import math

import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import ResourceExhausted
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.tensor import DataType

_COPIES = 6
"""Of the weights: themselves, gradients, the optimiser's two moments, the best so far, the model's bytes."""
_PASSES = 2
"""Every result is kept for the backward pass, with its gradient."""


def training_bytes(artifact: Artifact, data: Dataset, batch: int) -> int:
    """Bytes that training ``artifact`` in batches of ``batch`` samples of ``data`` takes: an estimate, which does not know what
    operators need inside. Results whose shapes cannot be inferred count as nothing.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(read_proto(artifact))
    calls = 1
    for entry in proto.graph.input:
        array = data.inputs.get(entry.name)
        dims = entry.type.tensor_type.shape.dim
        if array is None or len(dims) != array.ndim:
            continue
        fixed = dims[0].dim_value
        calls = max(1, batch // fixed) if fixed else 1
        for dim, size in zip(dims, (fixed or batch, *array.shape[1:]), strict=True):
            dim.dim_value = size
    graph = infer_shapes(proto).graph
    weights = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    results = 0
    for node in graph:
        for value in node.outputs:
            shape = value.shape.numpy() if value.shape is not None and value.shape.is_static() else None
            results += _FLOAT_BYTES * math.prod(shape) if shape is not None else 0
    return _COPIES * weights + _PASSES * calls * results


def check_training(artifact: Artifact, data: Dataset, batch: int, memory_bytes: int) -> None:
    """Raises ResourceExhausted if training needs more than ``memory_bytes``; 0 if that is unknown."""
    needed = training_bytes(artifact, data, batch)
    if memory_bytes and needed > memory_bytes:
        raise ResourceExhausted(
            f"training would need about {needed / (1 << 30):.1f} GiB of memory, there are {memory_bytes / (1 << 30):.1f}",
            "compress on a machine with more memory, or give smaller samples",
        )


_FLOAT_BYTES = DataType.FP32.dtype.itemsize
