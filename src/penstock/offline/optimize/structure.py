"""Structure of a model: what determines its speed."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from penstock.artifact import Artifact, Format, sha256
from penstock.errors import PenstockError
from penstock.offline.model_store import remembered
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.model import read_proto, tensors_of

_INDICES = TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL
"""Types of shapes, axes, indices and masks, whose values are part of the structure."""


def structure(artifact: Artifact) -> str:
    """A digest of the operators, attributes and connections, and of the types and shapes of the weights.

    Models of equal structure have equal speed, because kernels for dense tensors do not depend on the values of weights and scales.
    There is one exception: engines leave out the correction for zero points of 0. So the digest includes which weights are all zero.
    Models in other formats than ONNX, and models that cannot be read, have equal structure only if they are equal.
    """
    if artifact.format is not Format.ONNX:
        return artifact.digest
    try:
        return remembered("structure", artifact.digest, lambda: _structure(read_proto(artifact)), 0)
    except PenstockError:
        return artifact.digest


def _structure(proto: onnx.ModelProto) -> str:
    quantised = {node.input[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    for tensor in tensors_of(proto):
        is_index = tensor.data_type in _INDICES and tensor.name not in quantised
        if is_index or tensor.data_type == TensorProto.STRING:
            continue
        is_zero = not array_of(tensor).any()
        blank = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes([is_zero]))
        tensor.CopyFrom(blank)
    del proto.metadata_props[:]
    proto.ClearField("doc_string")
    return sha256(bytes(proto.SerializeToString(deterministic=True)))
