"""Recompute the statistics of BatchNormalization after a cut, without labels or training."""

from __future__ import annotations

from collections import Counter

import numpy as np
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.taps import Taps
from penstock.offline.optimize.mapped import array_of, artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.tensor import Array


def refresh_norms(artifact: Artifact, data: Dataset, *, batch_size: int = 64, threads: int = 1) -> Artifact:
    """Recompute the mean and variance of every BatchNormalization on ``data``, in graph order (Li et al., "EagleEye", 2020, §3.3).

    Statistics that are computed, or that several nodes share, are not changed. A model without BatchNormalization is returned
    unchanged. Raises InvalidData if the data do not fit the model, or a tensor becomes NaN or infinite.
    """
    proto = read_proto(artifact)
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    nodes = [
        node
        for node in proto.graph.node
        if node.op_type == "BatchNormalization"
        and all(name in constants and uses[name] == 1 for name in node.input[3:5])
    ]
    current = artifact
    for node in nodes:
        mean, variance = _moments(current, data, node.input[0], batch_size, threads)
        for name, values in zip(node.input[3:5], (mean, variance), strict=True):
            old = array_of(constants[name])
            constants[name].CopyFrom(numpy_helper.from_array(values.astype(old.dtype), name))
        current = artifact_of(proto)
    if current is artifact:
        return artifact
    about = {"norms": len(nodes), "samples": data.count}
    return artifact.derive(current, "refresh_norms", {"batch_size": batch_size}, about)


def _moments(artifact: Artifact, data: Dataset, tensor: str, batch_size: int, threads: int) -> tuple[Array, Array]:
    """FP64 mean and variance of each channel, axis 1, over all samples and positions."""
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    for _, array in Taps(artifact, data, batch_size=batch_size, threads=threads).run([tensor]):
        others = tuple(axis for axis in range(array.ndim) if axis != 1)
        count += array.size // array.shape[1]
        total = total + array.sum(axis=others, dtype=np.float64)
        squares = squares + np.square(array, dtype=np.float64).sum(axis=others)
    mean = total / count
    return mean, np.maximum(squares / count - mean**2, 0.0)
