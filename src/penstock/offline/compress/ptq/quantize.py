"""Post-training quantisation: write the INT8 version of an FP32 model with given ranges of the tensors.

Activations have one scale and zero point per tensor. Weights have one scale per output channel, given by the channel's largest
magnitude, or one scale per matrix product if the scheme says so. Biases are INT32. ``qdq_writer.py`` writes the model in QDQ form
(QuantizeLinear and DequantizeLinear around float operators), which ONNX Runtime and OpenVINO turn into integer kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import onnx

from penstock.artifact import Artifact, sha256
from penstock.offline.compress.ptq.qdq_placement import (
    LINEAR_OPS,
    FloatModel,
    QdqPlacement,
    float_model,
    nothing_to_quantise,
)
from penstock.offline.compress.ptq.qdq_writer import write_qdq
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.optimize.mapped import artifact_of


def quantize(
    artifact: Artifact,
    ranges: Mapping[str, Range],
    scheme: IntegerScheme,
    placement: QdqPlacement = QdqPlacement.LINEAR,
    keep_float: Collection[str] = (),
) -> Artifact:
    """Make the INT8 version of ``artifact``: the same FP32 inputs, outputs and dynamic axes, and about a quarter of the size.

    An operator that reads or writes a tensor without a range stays float. So do the nodes in ``keep_float``, named as in
    ``FloatModel(artifact)``. If a Relu or Clip is the only consumer of a tensor, the tensor gets the range of that operator's output.
    Fold BatchNormalization first. The result is deterministic. Raises Unsupported if no operator can become integer, InvalidModel if
    the model cannot be read, InvalidArgument for an unknown name in ``keep_float``.
    """
    model = float_model(artifact)
    slow = () if scheme.transposed else (node.name for node in model.nodes if node.op_type == "ConvTranspose")
    chosen = model.integer_nodes(placement, {*keep_float, *slow})
    nodes = [node for node in chosen if _has_ranges(model, node, ranges, placement)]
    linear = [node for node in nodes if node.op_type in LINEAR_OPS]
    if not linear:
        raise nothing_to_quantise()
    made = artifact_of(write_qdq(model, nodes, ranges, scheme, placement))
    options = {
        "activation": scheme.activation.value,
        "weight": scheme.weight.value,
        "reduce_range": scheme.reduce_range,
        "per_tensor": scheme.per_tensor,
        "transposed": scheme.transposed,
        "symmetric": scheme.symmetric,
        "placement": placement.value,
        "keep_float": sorted(set(keep_float)),
        "ranges": sha256(msgspec.json.encode(dict(ranges), order="sorted")),
    }
    facts = {
        "integer_operators": len(nodes),
        "linear_operators": len(linear),
        "operators": len(model.nodes),
        "size_ratio": round(made.size_bytes / artifact.size_bytes, 4),
    }
    return artifact.derive(made, "quantize", options, facts)


def _has_ranges(model: FloatModel, node: onnx.NodeProto, ranges: Mapping[str, Range], placement: QdqPlacement) -> bool:
    needed = model.activations([node])
    if node.op_type in placement.float_outputs:
        needed = [name for name in needed if name not in node.output]
    return all(name in ranges for name in needed)
