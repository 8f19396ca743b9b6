"""Estimate the memory that training a model needs."""

from __future__ import annotations

import math

import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import ResourceExhausted
from penstock.offline.optimize.graph import static_shape
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.tensor import DataType

_COPIES = 6
"""Copies of the weights: the weights, the gradients, the optimiser's two moments, the best state so far, and the model's bytes."""
_PASSES = 2
"""Copies of each result: the backward pass needs the result and its gradient."""


def training_bytes(artifact: Artifact, data: Dataset, batch: int) -> int:
    """Estimate the memory in bytes for training ``artifact`` on batches of ``batch`` samples of ``data``.

    Work space inside operators, and results whose shapes cannot be inferred, are not counted.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(read_proto(artifact))
    calls, sample = 1, data.rows(0, 1)
    for entry in proto.graph.input:
        array = sample.get(entry.name)
        dims = entry.type.tensor_type.shape.dim
        if array is None or len(dims) != array.ndim:
            continue
        fixed = dims[0].dim_value
        calls = max(1, batch // fixed) if fixed else 1
        for dim, size in zip(dims, (fixed or batch, *array.shape[1:]), strict=True):
            dim.dim_value = size
    graph = infer_shapes(proto).graph
    weights = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    shapes = (static_shape(value) for node in graph for value in node.outputs)
    elements = sum(math.prod(shape) for shape in shapes if shape is not None)
    return _COPIES * weights + _PASSES * calls * elements * DataType.FP32.dtype.itemsize


def check_training(artifact: Artifact, data: Dataset, batch: int, memory_bytes: int) -> None:
    """Raise ResourceExhausted if training needs more than ``memory_bytes``; 0 means unknown."""
    needed = training_bytes(artifact, data, batch)
    if memory_bytes and needed > memory_bytes:
        raise ResourceExhausted(
            f"training would need about {needed / (1 << 30):.1f} GiB of memory, but {memory_bytes / (1 << 30):.1f} GiB are available",
            "compress on a machine with more memory, or give smaller samples",
        )
