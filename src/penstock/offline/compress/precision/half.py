"""Weights stored in 16 bits and converted to 32 bits on load. The file has half the size, and the model keeps its speed.

A Cast to FP32 follows each weight. Engines run it once, when they load the model. Arithmetic remains in 32 bits: ONNX Runtime has no
x86 kernels for 16 bits, and OpenVINO computes in BF16 on CPUs that support it, for any type in the file.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.optimize.mapped import array_of, artifact_of, row_slices
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames
from penstock.tensor import Array, DataType

_TYPES = {"fp16": DataType.FP16, "bf16": DataType.BF16}
_CAST_OPSET = {"fp16": 9, "bf16": 13}


class HalfOptions(msgspec.Struct, frozen=True):
    """Options of ``halve_weights``."""

    kind: Literal["fp16", "bf16"] = "fp16"
    """FP16 has 11 significant bits and values up to 65504. BF16 has 8 significant bits and covers the range of FP32."""
    least_weights: int = 256
    """Tensors with fewer elements, and scalars, stay FP32: their Cast takes more bytes than it saves."""
    max_weight_error: float = 0.01
    """A tensor with a larger relative error stays FP32, since its values are too small for FP16."""


def halve_weights(artifact: Artifact, options: HalfOptions | None = None) -> Artifact:
    """``artifact`` with its FP32 weights stored in 16 bits; inputs, outputs and arithmetic stay FP32.

    A tensor with a value beyond the type's range, or with a relative error above ``max_weight_error``, stays FP32. Such tensors are
    listed under ``kept`` in the facts of the provenance step. Raises Unsupported if no tensor can be stored in 16 bits, or if the
    model's opset has no Cast from the type.
    """
    options = options or HalfOptions()
    proto = read_proto(artifact)
    given = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    fresh = FreshNames(proto.graph)
    casts: list[onnx.NodeProto] = []
    kept: list[str] = []
    worst = 0.0
    for tensor in proto.graph.initializer:
        # A scalar may be a parameter that ONNX Runtime must know before it folds constants, such as the ratio of a Dropout.
        large = tensor.dims and np.prod(tensor.dims) >= options.least_weights
        if tensor.data_type != DataType.FP32.onnx or tensor.name in given or not large:
            continue
        stored, error = _stored(array_of(tensor), _TYPES[options.kind])
        if not error <= options.max_weight_error:
            kept.append(tensor.name)
            continue
        worst = max(worst, error)
        casts.append(_store(tensor, stored, fresh(f"{tensor.name}_{options.kind}")))
    if not casts:
        raise Unsupported(
            f"no weight of the model can be stored as {options.kind.upper()}",
            f"these are too large or too small for the type: {', '.join(kept[:5])}"
            if kept
            else "it has no large FP32 weights",
        )
    opset = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset < _CAST_OPSET[options.kind]:
        raise Unsupported(
            f"the model has opset {opset}, whose Cast does not accept {options.kind.upper()}",
            f"export it with opset {_CAST_OPSET[options.kind]} or later",
        )
    nodes = [*casts, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    made = artifact_of(proto)
    facts = {
        "weights": len(casts),
        "kept": kept,
        "weight_error": round(worst, 8),
        "size_ratio": round(made.size_bytes / artifact.size_bytes, 4),
    }
    return artifact.derive(made, "halve_weights", msgspec.to_builtins(options), facts)


def _stored(weight: Array, datatype: DataType) -> tuple[Array, float]:
    """``weight`` in ``datatype`` and its relative error, which is infinite if a value overflows."""
    with np.errstate(over="ignore"):
        stored = weight.astype(datatype.dtype)
    lost, norms = [], []
    for rows in row_slices(weight):
        back = stored[rows].astype(np.float64)
        if not np.isfinite(back).all():
            return stored, np.inf
        lost.append(np.linalg.norm(back - weight[rows]))
        norms.append(np.linalg.norm(weight[rows].astype(np.float64)))
    norm = float(np.linalg.norm(norms))
    return stored, float(np.linalg.norm(lost)) / norm if norm else 0.0


def _store(tensor: onnx.TensorProto, stored: Array, stored_name: str) -> onnx.NodeProto:
    """Replace ``tensor`` by ``stored`` under another name. Returns the node that converts it back to the old name."""
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(stored, stored_name))
    return helper.make_node("Cast", [tensor.name], [name], to=DataType.FP32.onnx)
